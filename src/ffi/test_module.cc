// libquire_test_ffi.so: makes outcomes that no user can bring about on purpose, for
// tests/python/test_errors.py.
#include <tvm/ffi/reflection/registry.h>
#include <tvm/ffi/string.h>

#include <new>
#include <stdexcept>
#include <string>
#include <thread>

#include "base/check.h"
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
  void FailCheck(int64_t two) {
    latch_.Run([&]() -> Status {
      QUIRE_CHECK(two == 1) << "page 7 has " << two << " owners";
      return {};
    });
  }
  // In a commit, which is noexcept.
  void FailCheckInCommit(int64_t two) {
    latch_.Run([&]() noexcept -> Status {
      QUIRE_CHECK(two == 1) << "page 7 has " << two << " owners";
      return {};
    });
  }
  // On a thread of the library.
  void FailCheckOnThread(int64_t two) {
    latch_.Run([&]() -> Status {
      std::thread([&] { QUIRE_CHECK(two == 1) << "page 7 has " << two << " owners"; }).join();
      return {};
    });
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
  tf::reflection::GlobalDef().def("quire.test.fail_check", [](int64_t two) {
    CallChecked([&] { QUIRE_CHECK(two == 1) << "page 7 has " << two << " owners"; });
  });
  tf::reflection::ObjectDef<LatchObj>()
      .def(tf::reflection::init<>())
      .def("fail", &LatchObj::Fail)
      .def("fail_allocation", &LatchObj::FailAllocation)
      .def("fail_foreign", &LatchObj::FailForeign)
      .def("fail_check", &LatchObj::FailCheck)
      .def("fail_check_in_commit", &LatchObj::FailCheckInCommit)
      .def("fail_check_on_thread", &LatchObj::FailCheckOnThread)
      .def("succeed", &LatchObj::Succeed);
}

}  // namespace
}  // namespace quire::ffi
