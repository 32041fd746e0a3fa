// A CUDA device that does nothing, for the CPU wheel of torch: a device guard, which fake tensors and autograd ask for, and
// hooks that make CUDA the accelerator. torch looks for the hooks once and keeps what it finds.
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct Guard : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  c10::Device getDevice() const override { return {c10::DeviceType::CUDA, 0}; }
  c10::Device exchangeDevice(c10::Device) const override { return getDevice(); }
  c10::Stream getStream(c10::Device) const noexcept override {
    return c10::Stream(c10::Stream::DEFAULT, getDevice());
  }
  c10::Stream exchangeStream(c10::Stream stream) const noexcept override { return stream; }
};

struct Hooks : at::CUDAHooksInterface {
  explicit Hooks(at::CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return false; }  // else autograd records streams
  c10::DeviceIndex deviceCount() const override { return 1; }
  c10::DeviceIndex current_device() const override { return 0; }
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
};

}  // namespace

C10_REGISTER_GUARD_IMPL(CUDA, Guard)
namespace at {
using CUDAHooks = Hooks;
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
