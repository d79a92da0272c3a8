// quire.ChunkStore as an object that other objects of the library take.
#ifndef QUIRE_FFI_STORE_H_
#define QUIRE_FFI_STORE_H_

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/object.h>

#include <memory>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "quire/chunk_store.h"
#include "quire/engine.h"

namespace quire::ffi {

class ChunkStoreObj : public tvm::ffi::Object {
 public:
  explicit ChunkStoreObj(const OptionMap& fields);

  const std::shared_ptr<ChunkStore>& store() const { return store_; }

  OptionMap Statistics();
  // "stored", "removed", ... and what they are about, since the last call.
  tvm::ffi::Array<tvm::ffi::Any> TakeEvents();
  tvm::ffi::Array<tvm::ffi::Any> List(const tvm::ffi::String& tier);
  OptionMap Get(const tvm::ffi::String& tier, const tvm::ffi::String& key);
  // Fingerprint and canonical JSON of each passport that the store knows.
  tvm::ffi::Array<tvm::ffi::Any> Passports();
  // ---- Of the key space of a fingerprint (hexadecimal) and a salt.
  int64_t KnownPrefix(const tvm::ffi::String& fingerprint, const tvm::ffi::Bytes& salt,
                      const tvm::ffi::Array<tvm::ffi::String>& chain);
  // Waits until the chunks are in RAM, as far as they are stored. `ready`: how many of them;
  // `miss`: why no more.
  OptionMap Prefetch(const tvm::ffi::String& fingerprint, const tvm::ffi::Bytes& salt,
                     const tvm::ffi::TensorView& tokens, int64_t chunk_tokens, int64_t timeout_ms);
  void SetQuota(const tvm::ffi::String& fingerprint, const tvm::ffi::Bytes& salt, int64_t bytes_max,
                int64_t bytes_guaranteed);
  int64_t Clear(const tvm::ffi::String& fingerprint, const tvm::ffi::Bytes& salt);
  // ---- By keys (hexadecimal). How many chunks, or pins, it was.
  int64_t Pin(const tvm::ffi::Array<tvm::ffi::String>& keys);
  int64_t Unpin(const tvm::ffi::Array<tvm::ffi::String>& keys);
  void Touch(const tvm::ffi::Array<tvm::ffi::String>& keys);
  int64_t SetTtl(const tvm::ffi::Array<tvm::ffi::String>& keys, int64_t ttl_ms);
  int64_t SetPriority(const tvm::ffi::Array<tvm::ffi::String>& keys, int64_t priority);
  int64_t Remove(const tvm::ffi::Array<tvm::ffi::String>& keys);
  int64_t Verify(const tvm::ffi::String& tier);
  int64_t CollectGarbage(const tvm::ffi::String& tier);
  void Flush(int64_t timeout_ms);
  void Close();

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.ChunkStore", ChunkStoreObj, tvm::ffi::Object);

 private:
  FaultLatch latch_;
  std::shared_ptr<ChunkStore> store_;
};

class ChunkStoreRef : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(ChunkStoreRef, tvm::ffi::ObjectRef, ChunkStoreObj);
};

// chunk_tokens, load_timeout_ms, load_always, write, tails, mac_key.
StoreUseOptions ReadStoreUseOptions(const OptionMap& fields);

}  // namespace quire::ffi

#endif  // QUIRE_FFI_STORE_H_
