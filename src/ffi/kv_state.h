// quire.KVState: what tvm-ffi has of every state of the library, and of which a CompositeState can
// be made.
#ifndef QUIRE_FFI_KV_STATE_H_
#define QUIRE_FFI_KV_STATE_H_

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/object.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>

#include "ffi/errors.h"
#include "quire/attention_kv_cache.h"
#include "quire/kv_state.h"
#include "quire/recurrent_state.h"

namespace quire::ffi {

inline std::span<const int64_t> SpanOf(const tvm::ffi::Shape& shape) {
  return {shape.data(), shape.size()};
}

class KVStateObj : public tvm::ffi::Object {
 public:
  virtual ~KVStateObj() = default;

  void Clear();
  void AddSequence(int64_t seq_id);
  void RemoveSequence(int64_t seq_id);
  void ForkSequence(int64_t parent_id, int64_t child_id, int64_t fork_pos);
  void PopN(int64_t seq_id, int64_t n);
  void BeginForward(const tvm::ffi::Shape& seq_ids, const tvm::ffi::Shape& append_lengths);
  void BeginTreeForward(const tvm::ffi::Shape& seq_ids, const tvm::ffi::Shape& append_lengths,
                        const tvm::ffi::Shape& parents);
  void CommitAcceptedTokenTreeNodes(const tvm::ffi::Shape& seq_ids,
                                    const tvm::ffi::Shape& leaf_indices);
  int64_t GetTreeSize(int64_t seq_id);
  void EndForward();
  void AbortForward();

  virtual void SetRetained(int64_t seq_id, bool retained) = 0;
  virtual bool HasSequence(int64_t seq_id) = 0;
  virtual int64_t SequenceCount() = 0;
  virtual int64_t GetSequenceLength(int64_t seq_id) = 0;
  // The digest's bits as a signed number: tvm-ffi has no unsigned ones.
  virtual int64_t StateDigest() = 0;
  virtual void CheckInvariants() = 0;

  // As a part of a CompositeState; null if it can be none of that kind.
  virtual std::shared_ptr<AttentionKVCache> attention() const { return nullptr; }
  virtual std::shared_ptr<RecurrentState> recurrent() const { return nullptr; }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO("quire.KVState", KVStateObj, tvm::ffi::Object);

 protected:
  // A call that changes which sequences there are, or their tokens. BadState for a part of a
  // CompositeState: such calls are made on that, so that its parts hold the same sequences.
  template <typename F>
  auto Control(const char* call, F&& f) {
    RefuseIfPart(call);
    return latch_.Run(std::forward<F>(f));
  }

  void RefuseIfPart(const char* call) const;

  FaultLatch latch_;

 private:
  friend class PartHold;

  virtual KVState& state() const = 0;

  std::atomic<bool> is_part_{false};
};

class KVStateRef : public tvm::ffi::ObjectRef {
 public:
  TVM_FFI_DEFINE_OBJECT_REF_METHODS_NULLABLE(KVStateRef, tvm::ffi::ObjectRef, KVStateObj);
};

// As long as it lives the object is part of a CompositeState.
class PartHold {
 public:
  // BadState if it is part of another one.
  explicit PartHold(KVStateRef part);
  ~PartHold();
  PartHold(const PartHold&) = delete;
  PartHold& operator=(const PartHold&) = delete;

  bool Is(const KVStateRef& part) const { return part_.same_as(part); }

 private:
  const KVStateRef part_;
};

// The calls that a `State` has beyond those of KVState, from which it derives.
template <typename State>
class StateObject : public KVStateObj {
 public:
  void SetRetained(int64_t seq_id, bool retained) override {
    Control("SetRetained", [&] { return state_->SetRetained(seq_id, retained); });
  }
  bool HasSequence(int64_t seq_id) override {
    return latch_.Run([&] { return state_->HasSequence(seq_id); });
  }
  int64_t SequenceCount() override {
    return latch_.Run([&] { return state_->sequence_count(); });
  }
  int64_t GetSequenceLength(int64_t seq_id) override {
    return latch_.Run([&] { return state_->GetSequenceLength(seq_id); });
  }
  int64_t StateDigest() override {
    return static_cast<int64_t>(latch_.Run([&] { return state_->StateDigest(); }));
  }
  void CheckInvariants() override {
    latch_.Run([&] { return state_->CheckInvariants(); });
  }

 protected:
  // `make` gives a Result<std::unique_ptr<State>>.
  template <typename F>
  explicit StateObject(F&& make) : state_(latch_.Run(std::forward<F>(make))) {}

  const std::shared_ptr<State> state_;

 private:
  KVState& state() const override { return *state_; }
};

}  // namespace quire::ffi

#endif  // QUIRE_FFI_KV_STATE_H_
