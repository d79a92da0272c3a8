#include "engine/traffic/kv_traffic.h"

#include "base/check.h"

namespace quire {

KVTraffic::KVTraffic(const Parts& parts)
    : store({.model = parts.model,
             .state = parts.holders->state,
             .prefix_cache = &parts.holders->prefix_cache,
             .requests = &parts.holders->requests,
             .finder = &parts.holders->finder,
             .sequences = &parts.holders->sequences,
             .clock = parts.clock,
             .prefill_chunk = parts.prefill_chunk}),
      remote({.state = parts.holders->state,
              .requests = &parts.holders->requests,
              .finder = &parts.holders->finder,
              .clock = parts.clock,
              .bytes_per_token = parts.bytes_per_token,
              .staging_bytes = parts.staging_bytes}),
      prefill({.state = parts.holders->state,
               .requests = &parts.holders->requests,
               .sequences = &parts.holders->sequences,
               .prefix_cache = &parts.holders->prefix_cache,
               .clock = parts.clock,
               .bytes_per_token = parts.bytes_per_token,
               .states = StateSizesOf(parts.model->info().recurrent_layers),
               .sending_bytes = parts.sending_bytes,
               .prefill_chunk = parts.prefill_chunk}),
      requests_(parts.holders->requests),
      clock_(*parts.clock) {}

void KVTraffic::StartLoads() {
  store.StartLoads();
  remote.HoldBack(store.is_attached());
}

Request* KVTraffic::NextToAdmit() const {
  return requests_.NextToAdmit(remote.admissible(store.admissible()));
}

bool KVTraffic::CanRun(const Request& request, const Sample& sample) {
  return !RemoteTraffic::Receives(request, sample) && prefill.GrantRoom(request);
}

void KVTraffic::NotePreempted(Request* request) noexcept {
  QUIRE_CHECK(request->load == nullptr) << "request " << request->id << " loads while it runs";
  request->layers = nullptr;
  request->remote = nullptr;
  prefill.NotePreempted(request);
}

void KVTraffic::NoteComputed() noexcept {
  store.StoreComputed();
  remote.NoteComputed();
}

bool KVTraffic::Await() {
  return store.AwaitLoad() || remote.Await() || prefill.AwaitRoom(&clock_);
}

void KVTraffic::CheckInvariants() const {
  for (const auto& request : requests_.waiting()) {
    QUIRE_CHECK(request->load == nullptr || store.is_attached());
    QUIRE_CHECK(request->layers == nullptr) << "request " << request->id << " waits with layers";
    QUIRE_CHECK(request->remote == nullptr) << "request " << request->id << " waits and receives";
  }
  for (const auto& request : requests_.running()) {
    QUIRE_CHECK(request->load == nullptr) << "request " << request->id << " loads while it runs";
  }
}

void KVTraffic::Publish(EngineStats* stats) noexcept {
  store.Publish(stats);
  remote.Publish(stats);
  prefill.Publish(stats);
}

}  // namespace quire
