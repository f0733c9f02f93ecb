// Entry points: C functions, so that a library needs neither Python's headers nor torch's. They take pointers, sizes and
// strides in elements, and the number of threads; baton/modeling/kernels/calls checks sizes and types before it calls them.
//
// An entry point returns null, or a message where it refuses what it was given.

#pragma once

#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>

#define BATON_ENTRY extern "C" __attribute__((visibility("default")))

namespace {

template <class Part>
std::string as_text(const Part& part) {
  if constexpr (std::is_arithmetic_v<Part>) {
    return std::to_string(part);
  } else {
    return std::string(part);
  }
}

// Throws std::invalid_argument with the parts as its message, unless the condition holds.
template <class... Parts>
void check(bool holds, const Parts&... parts) {
  if (!holds) [[unlikely]] throw std::invalid_argument((as_text(parts) + ...));
}

// Does an entry point's work. Returns null, or the message of what it threw, which lasts until the thread's next call.
template <class Work>
const char* guarded(Work work) noexcept {
  thread_local std::string message;
  try {
    work();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

}  // namespace
