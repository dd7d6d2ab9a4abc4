/* The pool as a memory resource of RMM, for C++ programs.
 *
 *     #include <vmm_pool_rmm.hpp>
 *     auto resource = vmm_pool_rmm::resource(device);
 *     rmm::mr::set_current_device_resource_ref(resource);   // older RMM: set_current_device_resource(&resource)
 *
 * Link with -lvmm_pool. The resource has no state of its own: the memory is that of the process's own pool of
 * the device, which lives as long as the process.
 */
#ifndef VMM_POOL_RMM_HPP
#define VMM_POOL_RMM_HPP

#include <cstddef>
#include <cstdint>
#include <string>

#include <rmm/error.hpp>
#include <rmm/mr/callback_memory_resource.hpp>

#include <vmm_pool.h>
#include <vmm_pool_torch.h>

namespace vmm_pool_rmm {
namespace detail {

/* RMM names a stream by a type of its own, or by that of CUDA's C++ library. */
template <typename Stream>
auto handle(const Stream& stream, int) -> decltype(static_cast<void*>(stream.value())) {
  return stream.value();
}
template <typename Stream>
auto handle(const Stream& stream, long) -> decltype(static_cast<void*>(stream.get())) {
  return stream.get();
}

inline void* as_argument(int device) {
  return reinterpret_cast<void*>(static_cast<std::intptr_t>(device));
}
inline int as_device(void* argument) {
  return static_cast<int>(reinterpret_cast<std::intptr_t>(argument));
}

} // namespace detail

/* Blocks belong to the stream that RMM names, and go back behind the stream that it names then. A request that
 * cannot be served throws rmm::out_of_memory with the pool's report, or rmm::bad_alloc for any other reason. */
inline rmm::mr::callback_memory_resource resource(int device) {
  auto allocate = [](std::size_t bytes, auto stream, void* argument) -> void* {
    if (bytes == 0) {
      return nullptr;
    }
    int device = detail::as_device(argument);
    void* block = vmm_pool_torch_alloc(static_cast<ssize_t>(bytes), device, detail::handle(stream, 0));
    if (block == nullptr) {
      const char* words = vmm_pool_last_error();
      std::string text = std::string("vmm-pool: ") + (words != nullptr ? words : "no reason was given");
      if (vmm_pool_last_status() == VMM_POOL_OUT_OF_MEMORY) {
        throw rmm::out_of_memory(text);
      }
      throw rmm::bad_alloc(text);
    }
    return block;
  };
  auto deallocate = [](void* block, std::size_t bytes, auto stream, void* argument) {
    int device = detail::as_device(argument);
    vmm_pool_torch_free(block, static_cast<ssize_t>(bytes), device, detail::handle(stream, 0));
  };
  return rmm::mr::callback_memory_resource(
      allocate, deallocate, detail::as_argument(device), detail::as_argument(device));
}

} // namespace vmm_pool_rmm

#endif
