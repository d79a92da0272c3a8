// Grammars by XGrammar, of which only the library is loaded: its Python package needs torch. What
// it registers with tvm-ffi is found by name, as its own Python files do.
#include "ffi/grammar.h"

#include <sys/resource.h>
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/accessor.h>
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <algorithm>
#include <new>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "ffi/errors.h"
#include "ffi/options.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

constexpr std::string_view kTokenizerInfo = "xgrammar.tvm_ffi_binding.TokenizerInfo";
constexpr std::string_view kCompiler = "xgrammar.tvm_ffi_binding.GrammarCompiler";
constexpr std::string_view kCompiled = "xgrammar.tvm_ffi_binding.CompiledGrammar";
constexpr std::string_view kMatcher = "xgrammar.tvm_ffi_binding.GrammarMatcher";
constexpr int64_t kRawVocabulary = 0;  // tokens are given as their bytes
// A usual grammar takes some microseconds for a token, milliseconds at most. One whose text can be
// read in many ways takes longer with each token, and every other request waits for it.
constexpr double kTokenSecondsMax = 0.1;
// Blanks between two elements of JSON: enough for deep indentation, and an end to blanks.
constexpr int64_t kBlanksMax = 64;

// "[12:00:00] /project/cpp/x.cc:12: What is wrong" without its place.
std::string PlainMessage(std::string_view message) {
  const size_t file = message.find(".cc:");
  const size_t end = file == std::string_view::npos ? file : message.find(": ", file);
  if (end != std::string_view::npos) message.remove_prefix(end + 2);
  while (!message.empty() && (message.back() == '\n' || message.back() == ' '))
    message.remove_suffix(1);
  return std::string(message);
}

// Calls into XGrammar; what it throws is a value.
template <typename F>
auto Guarded(StatusCode code, F&& f) -> std::invoke_result_t<F> {
  try {
    return f();
  } catch (const tf::Error& error) {
    return Status(code, PlainMessage(error.message()));
  } catch (const std::bad_alloc&) {
    return Status::OutOfMemory();
  } catch (const std::exception& error) {
    return Status(code, PlainMessage(error.what()));
  }
}

// The time that this thread has computed, in seconds.
double ComputedSeconds() noexcept {
  rusage usage = {};
  getrusage(RUSAGE_THREAD, &usage);
  const auto seconds = [](const timeval& time) {
    return static_cast<double>(time.tv_sec) + static_cast<double>(time.tv_usec) * 1e-6;
  };
  return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// The functions that are used, found once. REQUIRES: XGrammar's library is loaded, for the life of
// the process, as objects hold pointers to its code. Python does that, as with this library.
struct Library {
  Library() {
    const auto find = [](std::string_view type, const char* name) {
      return tf::reflection::GetMethod(type, name);
    };
    new_tokenizer_info = find(kTokenizerInfo, "__ffi_init__");
    special_token_ids = find(kTokenizerInfo, "special_token_ids");
    new_compiler = find(kCompiler, "__ffi_init__");
    compile_json_schema = find(kCompiler, "compile_json_schema");
    compile_regex = find(kCompiler, "compile_regex");
    compile_grammar = find(kCompiler, "compile_grammar_from_strings");
    compile_structural_tag = find(kCompiler, "compile_structural_tag");
    get_cache_size_bytes = find(kCompiler, "get_cache_size_bytes");
    memory_size_bytes = find(kCompiled, "memory_size_bytes");
    new_matcher = find(kMatcher, "__ffi_init__");
    fill_next_token_bitmask = find(kMatcher, "fill_next_token_bitmask");
    accept_token = find(kMatcher, "accept_token");
    rollback = find(kMatcher, "rollback");
    fork = find(kMatcher, "fork");
    is_terminated = find(kMatcher, "is_terminated");
  }

  tf::Function new_tokenizer_info, special_token_ids, new_compiler, compile_json_schema,
      compile_regex, compile_grammar, compile_structural_tag, get_cache_size_bytes,
      memory_size_bytes, new_matcher, fill_next_token_bitmask, accept_token, rollback, fork,
      is_terminated;
};

// XGrammar's classes of characters take any bytes that look like UTF-8: surrogates, numbers beyond
// U+10FFFF and forms that are longer than needed, too. What follows keeps them out.

// The least and the greatest byte that may follow a lead byte.
struct Range {
  uint8_t least = 0x80, most = 0xBF;
};
Range BehindLead(uint8_t lead) {
  if (lead == 0xE0) return {0xA0, 0xBF};
  if (lead == 0xED) return {0x80, 0x9F};
  if (lead == 0xF0) return {0x90, 0xBF};
  if (lead == 0xF4) return {0x80, 0x8F};
  return {};
}
int64_t CharacterLength(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2 || lead > 0xF4) return 0;
  return lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
}

// A token's bytes, as far as they are of matter for the bytes beside them.
struct TokenBytes {
  bool in_no_text = true;  // none, or bytes that no UTF-8 has
  bool in_no_json = true;  // also: control characters but line breaks, which stand between words
  uint8_t first = 0;
  uint8_t open_lead = 0;  // the last byte, if it is a lead byte; else 0
};

uint32_t Bit(int64_t token) { return uint32_t{1} << (token % 32); }

TokenBytes ReadToken(std::string_view bytes) {
  TokenBytes token;
  if (bytes.empty()) return token;
  const auto byte = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  token.first = byte(0);
  size_t i = 0;
  while (i < bytes.size() && byte(i) >= 0x80 && byte(i) < 0xC0) ++i;  // of a character before
  if (i > 3) return token;
  token.in_no_json = false;
  while (i < bytes.size()) {
    const uint8_t lead = byte(i);
    const auto length = static_cast<size_t>(CharacterLength(lead));
    if (length == 0) return {};
    if (lead < 0x20 && lead != '\n' && lead != '\r') token.in_no_json = true;
    for (size_t k = 1; k < length && i + k < bytes.size(); ++k) {
      const Range range = k == 1 ? BehindLead(lead) : Range();
      if (byte(i + k) < range.least || byte(i + k) > range.most) return {};
    }
    if (length > 1 && i + 1 == bytes.size()) token.open_lead = lead;
    i += length;
  }
  token.in_no_text = false;
  return token;
}

// What all matchers of a vocabulary share.
struct Vocabulary {
  std::shared_ptr<const Library> library;
  int64_t size = 0;
  std::vector<bool> ends;          // [size] ends an answer
  std::vector<bool> never;         // [size] to ask XGrammar about one prints a warning
  std::vector<TokenBytes> tokens;  // [size]
  // Bits as of TokenFilter::FillMask: those that texts have, or JSON, and all that end the answer.
  std::vector<uint32_t> text_mask, json_mask;
};

class XGrammarFilter final : public TokenFilter {
 public:
  XGrammarFilter(std::shared_ptr<const Vocabulary> vocabulary, tf::ObjectRef matcher, bool is_json,
                 std::vector<uint8_t> open_leads = {})
      : vocabulary_(std::move(vocabulary)),
        matcher_(std::move(matcher)),
        is_json_(is_json),
        open_leads_(std::move(open_leads)) {}

  int64_t vocab_size() const noexcept override { return vocabulary_->size; }

  Result<std::unique_ptr<TokenFilter>> Fork() const override {
    return Guarded(StatusCode::kInternal, [&]() -> Result<std::unique_ptr<TokenFilter>> {
      return std::unique_ptr<TokenFilter>(std::make_unique<XGrammarFilter>(
          vocabulary_, library().fork(matcher_).cast<tf::ObjectRef>(), is_json_, open_leads_));
    });
  }

  Status FillMask(std::span<uint32_t> mask) override {
    return Bounded([&]() -> Status {
      // It leaves a mask of all tokens as it is.
      std::fill(mask.begin(), mask.end(), ~uint32_t{0});
      int64_t shape[] = {1, std::ssize(mask)};
      int64_t strides[] = {shape[1], 1};
      DLTensor tensor = {};
      tensor.data = mask.data();
      tensor.device = {kDLCPU, 0};
      tensor.ndim = 2;
      tensor.dtype = {kDLInt, 32, 1};
      tensor.shape = shape;
      tensor.strides = strides;
      library().fill_next_token_bitmask(matcher_, &tensor, int64_t{0}, false);
      for (size_t i = 0; i < mask.size(); ++i) mask[i] &= usual_mask()[i];
      if (open_lead() == 0) return {};
      for (int64_t token = 0; token < vocabulary_->size; ++token) {
        if (!MayFollow(token)) mask[static_cast<size_t>(token / 32)] &= ~Bit(token);
      }
      return {};
    });
  }

  Result<bool> Accept(int32_t token) override {
    if (token < 0 || token >= vocabulary_->size || vocabulary_->never[static_cast<size_t>(token)] ||
        (usual_mask()[static_cast<size_t>(token / 32)] & Bit(token)) == 0 || !MayFollow(token))
      return false;
    return Bounded([&]() -> Result<bool> {
      if (library().is_terminated(matcher_).cast<bool>()) return false;
      if (!library().accept_token(matcher_, int64_t{token}, false).cast<bool>()) return false;
      open_leads_.push_back(vocabulary_->tokens[static_cast<size_t>(token)].open_lead);
      return true;
    });
  }

  Status Rollback(int64_t count) override {
    return Guarded(StatusCode::kInternal, [&]() -> Status {
      library().rollback(matcher_, count);
      open_leads_.resize(open_leads_.size() - static_cast<size_t>(count));
      return {};
    });
  }

 private:
  const Library& library() const { return *vocabulary_->library; }

  std::span<const uint32_t> usual_mask() const {
    return is_json_ ? vocabulary_->json_mask : vocabulary_->text_mask;
  }
  uint8_t open_lead() const { return open_leads_.empty() ? 0 : open_leads_.back(); }
  // Whether the token's first byte may follow the last one.
  bool MayFollow(int64_t token) const {
    if (open_lead() == 0) return true;
    const Range range = BehindLead(open_lead());
    const uint8_t first = vocabulary_->tokens[static_cast<size_t>(token)].first;
    return range.least <= first && first <= range.most;
  }

  // A call that takes too long has an error: TooLarge.
  template <typename F>
  static auto Bounded(F&& f) -> std::invoke_result_t<F> {
    const double before = ComputedSeconds();
    auto result = Guarded(StatusCode::kInternal, f);
    if (ComputedSeconds() - before <= kTokenSecondsMax) return result;
    return Status(StatusCode::kTooLarge,
                  "the grammar is too costly: one token took more than 0.1 s, as its text can be "
                  "read in too many ways; make it unambiguous, or nest fewer counted repetitions");
  }

  const std::shared_ptr<const Vocabulary> vocabulary_;
  const tf::ObjectRef matcher_;
  const bool is_json_;
  std::vector<uint8_t> open_leads_;  // behind each accepted token: TokenBytes::open_lead
};

// BadArgument if no token may begin an answer.
Status CheckBegins(const TokenFilter& filter) {
  QUIRE_ASSIGN_OR_RETURN(const std::unique_ptr<TokenFilter> fork, filter.Fork());
  std::vector<uint32_t> mask(static_cast<size_t>((filter.vocab_size() + 31) / 32));
  QUIRE_RETURN_IF_ERROR(fork->FillMask(mask));
  for (int64_t token = 0; token < filter.vocab_size(); ++token) {
    if ((mask[static_cast<size_t>(token / 32)] & Bit(token)) != 0) return {};
  }
  return Status(StatusCode::kBadArgument, "no text of this model's tokens fits it");
}

// Draws `tokens` tokens by lot, from the beginning again at each end. The filter's error if one
// takes too long.
Status Walk(const TokenFilter& filter, const std::vector<bool>& ends, int64_t tokens) {
  std::vector<uint32_t> mask(static_cast<size_t>((filter.vocab_size() + 31) / 32));
  std::vector<int32_t> allowed;
  std::mt19937_64 lot(1);
  std::unique_ptr<TokenFilter> fork;
  for (int64_t i = 0; i < tokens; ++i) {
    if (fork == nullptr) {
      QUIRE_ASSIGN_OR_RETURN(fork, filter.Fork());
    }
    QUIRE_RETURN_IF_ERROR(fork->FillMask(mask));
    allowed.clear();
    for (int64_t token = 0; token < filter.vocab_size(); ++token) {
      if ((mask[static_cast<size_t>(token / 32)] & Bit(token)) != 0 &&
          !ends[static_cast<size_t>(token)])
        allowed.push_back(static_cast<int32_t>(token));
    }
    if (allowed.empty()) {
      fork = nullptr;
      continue;
    }
    QUIRE_ASSIGN_OR_RETURN(const bool accepted, fork->Accept(allowed[lot() % allowed.size()]));
    if (!accepted) return Status(StatusCode::kInternal, "its mask has a token that it refuses");
  }
  return {};
}

// quire.GrammarCompiler: grammars for one vocabulary. Calls may come from any thread.
class GrammarCompilerObj : public tf::Object {
 public:
  // tokens: the bytes of each token, none for those that no text has.
  // vocab_size: of the model, at least as many. end_ids: that end an answer. cache_bytes: of
  // compiled grammars, the last used. threads: that compile one.
  explicit GrammarCompilerObj(const OptionMap& fields) {
    OptionsReader reader("GrammarCompiler", fields);
    int64_t cache_bytes = 0;
    int64_t threads = 1;
    reader.Read("vocab_size", &vocabulary_->size);
    reader.Read("cache_bytes", &cache_bytes);
    reader.Read("threads", &threads);
    const auto tokens = reader.Get<tf::Array<tf::Bytes>>("tokens").value_or(tf::Array<tf::Bytes>());
    const auto end_ids = reader.Get<tf::Array<int64_t>>("end_ids").value_or(tf::Array<int64_t>());
    reader.Finish();
    if (end_ids.empty()) {
      ThrowBadArgument(
          "a grammar says where the answer ends, and this model has no token that "
          "ends one");
    }
    ThrowIfError(Guarded(StatusCode::kIncompatible, [&]() -> Status {
      vocabulary_->library = std::make_shared<const Library>();
      const tf::Any info =
          library().new_tokenizer_info(tokens, kRawVocabulary, vocabulary_->size, end_ids, false);
      vocabulary_->never.resize(static_cast<size_t>(vocabulary_->size));
      vocabulary_->tokens.resize(static_cast<size_t>(vocabulary_->size));
      const auto words = static_cast<size_t>((vocabulary_->size + 31) / 32);
      vocabulary_->text_mask.resize(words);
      vocabulary_->json_mask.resize(words);
      for (size_t i = 0; i < tokens.size(); ++i) {
        const tf::Bytes bytes = tokens[static_cast<int64_t>(i)];
        const TokenBytes token = ReadToken({bytes.data(), bytes.size()});
        vocabulary_->tokens.at(i) = token;
        const uint32_t bit = Bit(static_cast<int64_t>(i));
        if (!token.in_no_text) vocabulary_->text_mask[i / 32] |= bit;
        if (!token.in_no_json) vocabulary_->json_mask[i / 32] |= bit;
      }
      vocabulary_->ends.resize(static_cast<size_t>(vocabulary_->size));
      for (const int64_t id : end_ids) {
        vocabulary_->ends.at(static_cast<size_t>(id)) = true;
        vocabulary_->text_mask.at(static_cast<size_t>(id / 32)) |= Bit(id);
        vocabulary_->json_mask.at(static_cast<size_t>(id / 32)) |= Bit(id);
      }
      for (const int64_t id : library().special_token_ids(info).cast<tf::Array<int64_t>>())
        vocabulary_->never.at(static_cast<size_t>(id)) = true;
      compiler_ = library().new_compiler(info, threads, true, cache_bytes).cast<tf::ObjectRef>();
      return {};
    }));
  }

  // kind: "json_schema", "regex", "grammar" (EBNF), "structural_tag". BadArgument for a text that
  // XGrammar does not take, with its words.
  tf::ObjectRef Compile(const tf::String& kind, const tf::String& text) {
    const std::string name(kind);
    return ValueOrThrow(Guarded(StatusCode::kBadArgument, [&]() -> Result<tf::ObjectRef> {
      const tf::Any compiled = CompileText(name, text);
      tf::ObjectRef matcher = library()
                                  .new_matcher(compiled, nullptr, false, int64_t{-1}, nullptr)
                                  .cast<tf::ObjectRef>();
      const bool is_json = name == "json_schema";
      auto filter =
          std::make_shared<const XGrammarFilter>(vocabulary_, std::move(matcher), is_json);
      QUIRE_RETURN_IF_ERROR(CheckBegins(*filter));
      const auto bytes = library().memory_size_bytes(compiled).cast<int64_t>();
      return tf::ObjectRef(tf::make_object<GrammarObj>(std::move(filter), bytes));
    }));
  }

  // Draws tokens of a compiled grammar by lot. BadArgument if one takes too long.
  void TryTokens(const GrammarRef& grammar, int64_t tokens) {
    ThrowIfError(Walk(*grammar->filter(), vocabulary_->ends, tokens));
  }

  int64_t CacheBytes() { return library().get_cache_size_bytes(compiler_).cast<int64_t>(); }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.GrammarCompiler", GrammarCompilerObj, tf::Object);

 private:
  const Library& library() const { return *vocabulary_->library; }

  tf::Any CompileText(const std::string& kind, const tf::String& text) const {
    constexpr bool kAnyBlanks = true;
    constexpr bool kStrict = true;  // no properties beside those that are named
    constexpr bool kAnyOrder = false;
    if (kind == "json_schema") {
      return library().compile_json_schema(compiler_, text, kAnyBlanks, nullptr, nullptr, kStrict,
                                           kBlanksMax, kAnyOrder);
    }
    if (kind == "regex") return library().compile_regex(compiler_, text);
    if (kind == "structural_tag") return library().compile_structural_tag(compiler_, text);
    if (kind == "grammar") return library().compile_grammar(compiler_, text, tf::String("root"));
    ThrowBadArgument("there is no kind of grammar named " + kind);
  }

  const std::shared_ptr<Vocabulary> vocabulary_ = std::make_shared<Vocabulary>();
  tf::ObjectRef compiler_;
};

TVM_FFI_STATIC_INIT_BLOCK() {
  // A function and no constructor: calls of functions let other Python threads run meanwhile.
  tf::reflection::GlobalDef().def("quire.GrammarCompiler.create", [](const OptionMap& fields) {
    return CallChecked([&] { return tf::ObjectRef(tf::make_object<GrammarCompilerObj>(fields)); });
  });
  tf::reflection::ObjectDef<GrammarObj>().def("bytes", &GrammarObj::bytes);
  tf::reflection::ObjectDef<GrammarCompilerObj>()
      .def("compile", &GrammarCompilerObj::Compile)
      .def("try_tokens", &GrammarCompilerObj::TryTokens)
      .def("cache_bytes", &GrammarCompilerObj::CacheBytes);
}

}  // namespace
}  // namespace quire::ffi
