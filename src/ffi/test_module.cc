// libquire_test_ffi.so: makes outcomes that no user can bring about on purpose, for
// tests/python/test_errors.py.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <new>
#include <stdexcept>
#include <string>

#include "ffi/errors.h"

namespace quire::ffi {
namespace {

namespace tf = tvm::ffi;

class LatchObj : public tf::Object {
 public:
  // Throws the outcome with this name.
  void Fail(const tf::String& code_name, const tf::String& message) {
    latch_.Run([&] {
      for (const ErrorKind& entry : ErrorKinds()) {
        if (StatusCodeName(entry.code) == std::string(code_name)) {
          return Status(entry.code, std::string(message));
        }
      }
      return Status(StatusCode::kBadArgument, "no such code: " + std::string(code_name));
    });
  }
  void FailAllocation() {
    latch_.Run([]() -> Status { throw std::bad_alloc(); });
  }
  void FailForeign(const tf::String& message) {
    latch_.Run([&]() -> Status { throw std::logic_error(std::string(message)); });
  }
  int64_t Succeed() {
    return latch_.Run([] { return Result<int64_t>(7); });
  }

  [[maybe_unused]] static constexpr bool _type_mutable = true;
  TVM_FFI_DECLARE_OBJECT_INFO_FINAL("quire.test.Latch", LatchObj, tf::Object);

 private:
  FaultLatch latch_;
};

TVM_FFI_STATIC_INIT_BLOCK() {
  tf::reflection::ObjectDef<LatchObj>()
      .def(tf::reflection::init<>())
      .def("fail", &LatchObj::Fail)
      .def("fail_allocation", &LatchObj::FailAllocation)
      .def("fail_foreign", &LatchObj::FailForeign)
      .def("succeed", &LatchObj::Succeed);
}

}  // namespace
}  // namespace quire::ffi
