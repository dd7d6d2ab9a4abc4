// What shim.cpp uses of PyTorch's header, for tests on machines without PyTorch.
#pragma once
#include <exception>
#include <sstream>
#include <string>

#define C10_UNLIKELY(expr) (__builtin_expect(static_cast<bool>(expr), 0))

namespace c10 {
class Error : public std::exception {
 public:
  explicit Error(std::string words) : words_(std::move(words)) {}
  const char* what() const noexcept override { return words_.c_str(); }

 private:
  std::string words_;
};
class OutOfMemoryError : public Error {
  using Error::Error;
};
template <typename... Args>
std::string joined(const Args&... args) {
  std::ostringstream out;
  (out << ... << args);
  return out.str();
}
} // namespace c10

#define TORCH_CHECK_WITH(kind, good, ...)          \
  if (!(good)) {                                   \
    throw ::c10::kind(::c10::joined(__VA_ARGS__)); \
  }
#define TORCH_CHECK(good, ...) TORCH_CHECK_WITH(Error, good, __VA_ARGS__)
