// quire.tvm.install and uninstall: Quire's functions under TVM's global names. Each keeps the
// function that had the name before and hands it what is not Quire's.
#include <tvm/ffi/container/array.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/reflection/registry.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ffi/errors.h"
#include "ffi/options.h"
#include "ffi/tvm/tvm_create.h"
#include "ffi/tvm/tvm_kv_cache.h"
#include "ffi/tvm/tvm_rnn_state.h"
#include "ffi/tvm/tvm_transfer.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

constexpr const char* kPrefix = "vm.builtin.";

// ---------------------------------------------------------------------- functions of objects

// The method as a function whose first argument is the object.
template <typename Object, typename R, typename... Args>
tf::Function FunctionOf(R (Object::*method)(Args...)) {
  return tf::Function::FromTyped(
      [method](Object* object, Args... args) -> R { return (object->*method)(args...); });
}

// The same for functions of TVM that give their object back.
tf::Function GivingObject(const tf::Function& function) {
  return tf::Function::FromPacked(
      [function](const tf::AnyView* args, int32_t count, tf::Any* result) {
        function.CallPacked(args, count, result);
        *result = args[0];
      });
}

void BeginForward(const tf::AnyView* args, int32_t count, tf::Any* result) {
  if (count != 3 && count != 4) {
    ThrowBadArgument("kv_state_begin_forward: " + std::to_string(count) +
                     " arguments; they are the state, the sequence ids, the append lengths and, "
                     "if given, the parents");
  }
  tf::Optional<tf::Shape> parents;
  if (count == 4) parents = args[3].cast<tf::Optional<tf::Shape>>();
  args[0].cast<TvmStateObj*>()->BeginForward(args[1].cast<tf::Shape>(), args[2].cast<tf::Shape>(),
                                             parents);
  *result = nullptr;
}

tf::Array<tf::Tensor> MergeAttnOutputInplace(TvmKVCacheObj* cache, tf::Tensor o1, tf::Tensor lse1,
                                             tf::Tensor o2, tf::Tensor lse2) {
  for (const tf::Tensor* tensor : {&o1, &lse1, &o2, &lse2}) {
    if (!tensor->defined())
      ThrowBadArgument("attention_kv_cache_merge_attn_output_inplace: None is no tensor");
  }
  cache->MergeAttnOutputInplace(tf::TensorView(o1), tf::TensorView(lse1), tf::TensorView(o2),
                                tf::TensorView(lse2));
  return {std::move(o1), std::move(lse1)};
}

struct NamedFunction {
  std::string name;  // without kPrefix
  tf::Function function;
};

std::vector<NamedFunction> ObjectFunctions() {
  using S = TvmStateObj;
  using C = TvmKVCacheObj;
  using R = TvmRNNStateObj;
  return {
      {"kv_state_clear", FunctionOf(&S::Clear)},
      {"kv_state_add_sequence", FunctionOf(&S::AddSequence)},
      {"kv_state_remove_sequence", FunctionOf(&S::RemoveSequence)},
      {"kv_state_fork_sequence", FunctionOf(&S::ForkSequence)},
      {"kv_state_popn", FunctionOf(&S::PopN)},
      {"kv_state_begin_forward", tf::Function::FromPacked(BeginForward)},
      {"kv_state_end_forward", FunctionOf(&S::EndForward)},
      {"attention_kv_cache_empty", FunctionOf(&C::Empty)},
      {"attention_kv_cache_get_num_available_pages", FunctionOf(&C::GetNumAvailablePages)},
      {"attention_kv_cache_get_total_sequence_length", FunctionOf(&C::GetTotalSequenceLength)},
      {"attention_kv_cache_get_query_positions", FunctionOf(&C::GetQueryPositions)},
      {"attention_kv_cache_enable_sliding_window_for_seq",
       FunctionOf(&C::EnableSlidingWindowForSeq)},
      {"attention_kv_cache_attention_with_fused_qkv", FunctionOf(&C::AttentionWithFusedQKV)},
      {"attention_kv_cache_self_attention", FunctionOf(&C::SelfAttention)},
      {"attention_kv_cache_cross_attention", FunctionOf(&C::CrossAttention)},
      {"attention_kv_cache_attention_with_shared_kv", FunctionOf(&C::AttentionWithSharedKV)},
      {"attention_kv_cache_merge_attn_output_inplace",
       tf::Function::FromTyped(MergeAttnOutputInplace)},
      {"attention_kv_cache_debug_get_kv", FunctionOf(&C::DebugGetKV)},
      {"attention_kv_cache_get_sequence_length", FunctionOf(&C::GetSequenceLength)},
      {"attention_kv_cache_get_layout_hash", FunctionOf(&C::GetLayoutHash)},
      {"attention_kv_cache_get_checkpoint_metadata", FunctionOf(&C::GetCheckpointMetadata)},
      {"attention_kv_cache_export_page_group", FunctionOf(&C::ExportPageGroup)},
      {"attention_kv_cache_prepare_import", FunctionOf(&C::PrepareImport)},
      {"attention_kv_cache_import_page_group", FunctionOf(&C::ImportPageGroup)},
      {"attention_kv_cache_finish_import", FunctionOf(&C::FinishImport)},
      {"rnn_state_get", FunctionOf(&R::Get)},
      {"rnn_state_set", GivingObject(FunctionOf(&R::Set))},
      {"rnn_state_debug_get", FunctionOf(&R::DebugGet)},
      {"attention_kv_cache_commit_accepted_token_tree_nodes",
       FunctionOf(&C::CommitAcceptedTokenTreeNodes)},
      {"attention_kv_cache_append_mla_kv", GivingObject(FunctionOf(&C::AppendMLAKV))},
      {"attention_kv_cache_debug_get_kv_mla", FunctionOf(&C::DebugGetKVMLA)},
      {"kv_cache_disagg_prepare_recv", FunctionOf(&C::DisaggPrepareRecv)},
      {"kv_cache_disagg_mark_send", FunctionOf(&C::DisaggMarkSend)},
  };
}

bool IsOurs(const tf::AnyView* args, int32_t count) {
  return count > 0 && args[0].try_cast<const TvmStateObj*>().has_value();
}

tf::Function Dispatcher(const tf::Function& ours, const tf::Function& previous) {
  return tf::Function::FromPacked(
      [ours, previous](const tf::AnyView* args, int32_t count, tf::Any* result) {
        (IsOurs(args, count) ? ours : previous).CallPacked(args, count, result);
      });
}

// ---------------------------------------------------------------------- installation

using Create = tf::Any (*)(const TvmOptions&, const tf::AnyView*, int32_t);

tf::Function Creator(Create create, const TvmOptions& options) {
  return tf::Function::FromPacked(
      [create, options](const tf::AnyView* args, int32_t count, tf::Any* result) {
        *result = create(options, args, count);
      });
}

// What one call of quire.tvm.install() has replaced; python/quire/tvm.py owns it.
class TvmInstallationObj : public tf::Object {
 public:
  explicit TvmInstallationObj(const OptionMap& fields) {
    TvmOptions options;
    OptionsReader reader("quire.tvm.install", fields);
    reader.Read("tvm_window_span", &options.window_span);
    reader.Read("tvm_tree_commit", &options.tree_commit);
    reader.Read("tvm_tree_lengths", &options.tree_lengths);
    reader.Read("tvm_rnn_history1", &options.rnn_history1);
    options.pipeline_stage = reader.Get<int64_t>("pipeline_stage");
    if (options.pipeline_stage.value_or(0) < 0)
      ThrowBadArgument("quire.tvm.install: pipeline_stage is negative; stages count from 0");
    if (const auto rope = reader.Get<OptionMap>("rope")) options.rope = ReadRopeOptions(*rope);
    reader.Finish();
    options.transfer = std::make_shared<TvmTransferHub>();
    for (const NamedFunction& named : ObjectFunctions()) {
      const tf::Function previous = FindPrevious(named.name);
      names_.push_back({kPrefix + named.name, previous, Dispatcher(named.function, previous)});
    }
    for (const auto& [name, create] :
         {std::pair<std::string, Create>("paged_attention_kv_cache_create", CreateTvmKVCache),
          std::pair<std::string, Create>("rnn_state_create", CreateTvmRNNState)}) {
      names_.push_back({kPrefix + name, FindPrevious(name), Creator(create, options)});
    }
    for (const Name& name : names_) tf::Function::SetGlobal(name.name, name.ours, true);
  }

  void Uninstall() {
    for (const Name& name : names_) {
      const auto now = tf::Function::GetGlobal(name.name);
      if (now && now->same_as(name.ours)) continue;
      Throw(Status(StatusCode::kBadState, "quire.tvm.uninstall: somebody has replaced " +
                                              name.name +
                                              " after quire.tvm.install(); undo that first"));
    }
    for (const Name& name : names_) tf::Function::SetGlobal(name.name, name.previous, true);
    names_.clear();
  }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.tvm.Installation", TvmInstallationObj, tf::Object);

 private:
  struct Name {
    std::string name;
    tf::Function previous;
    tf::Function ours;
  };

  static tf::Function FindPrevious(const std::string& name) {
    const auto function = tf::Function::GetGlobal(kPrefix + name);
    if (function) return *function;
    Throw(Status(StatusCode::kIncompatible, "quire.tvm.install: there is no global function " +
                                                (kPrefix + name) + "; is TVM's runtime loaded?"));
  }

  std::vector<Name> names_;
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<TvmStateObj>();
  tf::reflection::ObjectDef<TvmKVCacheObj>()
      .def("abort_forward", &TvmKVCacheObj::AbortForward)
      .def("state_digest", &TvmKVCacheObj::StateDigest)
      .def("check_invariants", &TvmKVCacheObj::CheckInvariants);
  tf::reflection::ObjectDef<TvmRNNStateObj>()
      .def("abort_forward", &TvmRNNStateObj::AbortForward)
      .def("state_digest", &TvmRNNStateObj::StateDigest)
      .def("check_invariants", &TvmRNNStateObj::CheckInvariants);
  tf::reflection::ObjectDef<TvmInstallationObj>()
      .def(tf::reflection::init<OptionMap>())
      .def("uninstall", &TvmInstallationObj::Uninstall);
}

}  // namespace
}  // namespace quire::ffi
