// What shim.cpp uses of PyTorch's header, for tests on machines without PyTorch.
#pragma once
#include <utility>
namespace c10 {
using MempoolId_t = std::pair<unsigned long long, unsigned long long>;
}
