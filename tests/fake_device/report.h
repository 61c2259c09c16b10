/* Who is told of each call, and the devices and streams that are current. */
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <string>

#include "late_streams.h"

constexpr auto CUDA = c10::DeviceType::CUDA;
constexpr c10::DeviceIndex NUM_DEVICES = 8;

/* Returns whether a call that waits is to do without. */
using Report = int (*)(const char* kind, const char* what, int device, int64_t stream);
inline std::atomic<Report> report_to{nullptr};

inline thread_local c10::DeviceIndex current_device = 0;
inline thread_local std::array<c10::StreamId, NUM_DEVICES> current_streams{};

inline bool report(const char* kind, const std::string& what, late::Place stream) {
  const auto to = report_to.load();
  return to && to(kind, what.c_str(), stream.first, stream.second) != 0;
}

/* The current stream of a device. */
inline late::Place stream_of(c10::Device device) {
  const auto index = device.has_index() ? device.index() : current_device;
  return {index, current_streams[index]};
}

inline bool report(const char* kind, const std::string& what, c10::Device device) {
  return report(kind, what, stream_of(device));
}
