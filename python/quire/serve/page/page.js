// The page of `quire serve`: a chat, and how things stand. Texts of models and of the server are put
// into the page as text alone, never as HTML.
"use strict";

const at = (id) => document.getElementById(id);
let key = sessionStorage.getItem("quire-key") || "";
let messages = [];
let prefix = "";  // of this conversation: balancers of several servers hash on it
let answering = null;  // the AbortController of the answer that is being read

// ---- Requests

class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, body, signal) {
  const headers = {};
  if (key) headers.authorization = "Bearer " + key;
  if (body) headers["content-type"] = "application/json";
  if (body && prefix) headers["x-quire-prefix"] = prefix;
  const answer = await fetch(path, {
    method: body ? "POST" : "GET",
    headers,
    body: body && JSON.stringify(body),
    signal,
    cache: "no-store",
    credentials: "omit",
  });
  if (answer.ok) return answer;
  const found = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, found.error ? found.error.message : `status ${answer.status}`);
}

// The events of a stream: values of JSON, up to "[DONE]" or the end.
async function* events(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      held += value;
      const parts = held.split("\n\n");
      held = parts.pop();
      for (const part of parts) {
        if (part === "data: [DONE]") return;
        if (part.startsWith("data: ")) yield JSON.parse(part.slice(6));
      }
    }
  } finally {
    reader.cancel().catch(() => {});  // the connection of one that is left would stay open
  }
}

// ---- Keys

function askForKey(why) {
  at("key-form").hidden = false;
  at("key-error").textContent = why;
  at("key").focus();
}

at("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = at("key").value.trim();
  sessionStorage.setItem("quire-key", key);  // until this tab is closed
  at("key").value = "";
  at("key-form").hidden = true;
  watch();
});

// ---- Chat

function show(role, text) {
  const item = document.createElement("li");
  item.className = role;
  item.textContent = text;
  at("messages").append(item);
  return item;
}

function used(usage, firstMs, ms) {
  const details = usage.prompt_tokens_details;
  const where = ["memory", "ram", "disk", "redis"]
    .filter((tier) => details[tier + "_tokens"])
    .map((tier) => `${details[tier + "_tokens"]} from ${tier}`);
  const speed = usage.completion_tokens / Math.max(ms - firstMs, 1) * 1000;
  const words = [
    `${usage.prompt_tokens} tokens of prompt, ${details.cached_tokens} not computed`,
    ...where,
    `${usage.completion_tokens} of answer, ${speed.toFixed(1)} per second`,
    `first token after ${firstMs.toFixed(0)} ms`,
  ];
  if (details.miss) words.push(`why not more: ${details.miss}`);
  return words.join("; ");
}

async function answer() {
  answering = new AbortController();
  at("send").disabled = true;
  at("stop").hidden = false;
  const item = show("assistant", "");
  const begin = performance.now();
  const conversation = messages;  // another one may begin meanwhile
  let first = 0;
  try {
    const body = { messages: conversation, stream: true, stream_options: { include_usage: true } };
    const response = await ask("v1/chat/completions", body, answering.signal);
    if (conversation === messages) prefix = response.headers.get("x-quire-prefix") || prefix;
    for await (const event of events(response)) {
      if (event.error) throw new Error(event.error.message);
      for (const choice of event.choices) {
        if (choice.delta.content) {
          first = first || performance.now() - begin;
          item.textContent += choice.delta.content;
        }
      }
      if (event.usage) at("usage").textContent = used(event.usage, first, performance.now() - begin);
    }
  } catch (error) {
    if (error.status === 401) askForKey("The key is not valid.");
    if (error.name !== "AbortError") show("error", error.message);
  } finally {
    const text = item.textContent;
    if (text) conversation.push({ role: "assistant", content: text });
    answering = null;
    at("send").disabled = false;
    at("stop").hidden = true;
  }
}

at("chat-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = at("question").value.trim();
  if (!text || answering) return;
  at("question").value = "";
  messages.push({ role: "user", content: text });
  show("user", text);
  answer();
});

at("question").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey) {
    event.preventDefault();
    at("chat-form").requestSubmit();
  }
});

at("stop").addEventListener("click", () => answering && answering.abort());

at("clear").addEventListener("click", () => {
  if (answering) answering.abort();
  messages = [];
  prefix = "";
  at("messages").replaceChildren();
  at("usage").textContent = "";
});

// ---- State

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function bytes(count) {
  let unit = 0;
  while (count >= 1024 && unit + 1 < UNITS.length) {
    count /= 1024;
    unit += 1;
  }
  return `${count.toFixed(unit ? 1 : 0)} ${UNITS[unit]}`;
}

function rows(id, entries) {
  at(id).replaceChildren(
    ...entries.map((cells) => {
      const row = document.createElement("tr");
      for (const cell of cells) {
        const field = document.createElement("td");
        field.textContent = cell;
        row.append(field);
      }
      return row;
    }),
  );
}

function showState(state, before) {
  const { stats } = state;
  const seconds = before ? state.time - before.time : 0;
  const per = (name) => (seconds ? (stats[name] - before.stats[name]) / seconds : 0);
  const mean = (name) => {
    const { count, sum } = state.latency[name];
    const old = before ? before.latency[name] : { count: 0, sum: 0 };
    const [fresh, total] = count > old.count ? [count - old.count, sum - old.sum] : [count, sum];
    return fresh ? `${(total / fresh * 1000).toFixed(1)} ms` : "none yet";
  };
  at("model").textContent = `${state.model}, version ${state.version}`;
  at("health").textContent = state.draining ? "ending" : "ready";
  at("requests").textContent =
    `${stats.running} in work, ${stats.waiting} waiting, ${stats.loading} loading`;
  at("steps").textContent = `${stats.steps} in all, ${per("steps").toFixed(1)} per second`;
  at("tokens").textContent =
    `${per("completion_tokens").toFixed(1)} of answers and ` +
    `${per("computed_tokens").toFixed(1)} in all per second`;
  at("between").textContent = mean("between_tokens");
  at("first").textContent = mean("first_token");
  at("pages").max = stats.pages_total;
  const kept = Math.min(stats.retained_pages, stats.pages_in_use);  // as in /metrics
  at("pages").value = stats.pages_in_use - kept;
  at("pages-text").textContent =
    `${stats.pages_in_use - kept} of ${stats.pages_total} hold answers in work, ` +
    `${kept} are kept for later prompts, ${stats.pages_free} are free; ` +
    `${stats.page_size} tokens each, ${bytes(stats.kv_bytes)} in all`;
  at("kept").textContent =
    `The prefix cache keeps ${stats.retained_tokens} tokens of ` +
    `${stats.retained_sequences} prompts and answers.`;
  rows("tiers", state.tiers.map((tier) => [
    tier.name, tier.tokens, tier.bytes === null ? "" : bytes(tier.bytes),
    tier.hits === null ? "" : tier.hits, tier.misses === null ? "" : tier.misses,
  ]));
  rows("misses", Object.entries(state.misses));
  showStepTimes(state.step_times, before && before.step_times);
  showHeld(state.kv);
}

// ---- Blocks of KV

// Blocks in the order in which a reader goes down the tree, each with its depth.
function walk(blocks) {
  const children = blocks.map(() => []);
  const open = [];
  blocks.forEach((block, index) => {
    if (block.parent === null) open.push([index, 0]);
    else children[block.parent].push(index);
  });
  open.reverse();
  const order = [];
  while (open.length) {
    const [index, depth] = open.pop();
    order.push([index, depth]);
    for (const child of children[index].reverse()) open.push([child, depth + 1]);
  }
  return order;
}

function holderOf(sequence) {
  if (sequence.holder === "kept") return "kept for later prompts";
  if (sequence.holder === "internal") return "another process, or a document";
  return `request ${sequence.request_id}` + (sequence.sample ? `, sample ${sequence.sample}` : "");
}

function aboutBlock(block, holders) {
  const words = [
    `tokens ${block.begin} to ${block.end}: ${bytes(block.bytes)}`,
    block.sequences > 1 ? `seen by ${block.sequences}` : "seen by one",
    ...holders,
  ];
  if (block.stored_tokens) words.push(`${block.stored_tokens} in the store`);
  if (block.salt_digest) words.push(`for ${block.salt_digest}`);
  return words.join("; ");
}

const DEPTH_MAX = 24;  // that is shown by the distance from the margin

function showHeld(kv) {
  const holders = kv.blocks.map(() => []);
  for (const sequence of kv.sequences) {
    if (sequence.block !== null) holders[sequence.block].push(holderOf(sequence));
  }
  at("held-text").textContent =
    `${kv.blocks.length} blocks, ${kv.sequences.length} samples and kept texts` +
    (kv.cut ? ", and there are more" : "");
  at("blocks").replaceChildren(
    ...walk(kv.blocks).map(([index, depth]) => {
      const block = kv.blocks[index];
      const item = document.createElement("li");
      item.textContent = aboutBlock(block, holders[index]);
      item.classList.toggle("shared", block.sequences > 1);
      item.style.marginInlineStart = `${Math.min(depth, DEPTH_MAX)}rem`;
      return item;
    }),
  );
  rows("waiting", kv.waiting.map((request) => [
    request.request_id, request.prompt_tokens, `${request.seconds.toFixed(1)} s`,
  ]));
}

function showStepTimes(times, before) {
  const count = (of) => of.counts.reduce((sum, steps) => sum + steps, 0);
  const fresh = before && count(times) > count(before);
  const steps = count(times) - (fresh ? count(before) : 0);
  const seconds = times.seconds - (fresh ? before.seconds : 0);
  at("step").textContent = steps ? `${(seconds / steps * 1000).toFixed(1)} ms` : "none yet";
  const names = [...times.bounds.map((bound) => `${bound * 1000} ms`), "more"];
  rows("step-times", names.map((name, i) => [name, times.counts[i]]).filter((row) => row[1]));
}

let watching = 0;

async function watch() {
  const mine = ++watching;
  let before = null;
  while (mine === watching) {
    try {
      for await (const state of events(await ask("page/state"))) {
        if (mine !== watching) return;
        showState(state, before);
        before = state;
      }
      at("health").textContent = "the server has ended";
    } catch (error) {
      if (error.status === 401) {
        askForKey(key ? "The key is not valid." : "");
        return;
      }
      at("health").textContent = `no connection: ${error.message}`;
    }
    await new Promise((resume) => setTimeout(resume, 2000));
  }
}

watch();
