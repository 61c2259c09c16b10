/* An operator on the device, run by the host: at once, or when its stream comes to it. */
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/from_blob.h>

#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"
#include "report.h"

using at::Tensor;

inline bool is_here(const Tensor& tensor) { return tensor.defined() && tensor.device().type() == CUDA; }

/* A tensor of the CPU over the bytes of one of the device; where there are none, one of its own, which can grow. It does
 * not keep them: who carries out work later must find them there, as on a GPU. */
inline Tensor twin_of(const Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.dtype()).device(c10::kCPU);
  const void* address = tensor.storage().mutable_data();
  if (address == nullptr) return Tensor(at::detail::empty_strided_cpu(tensor.sizes(), tensor.strides(), options));
  auto* bytes = memory::bytes_of(address) + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize());
  return at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
}

/* The same with memory of its own, and whatever values there are now. */
inline Tensor copy_of(const Tensor& tensor) {
  const auto nbytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
  const Tensor bytes(at::detail::empty_cpu({static_cast<int64_t>(nbytes)}, at::TensorOptions().dtype(at::kByte)));
  if (nbytes > 0) std::memcpy(bytes.mutable_data_ptr(), twin_of(tensor).const_data_ptr(), nbytes);
  Tensor copy(at::detail::empty_cpu({0}, at::TensorOptions().dtype(tensor.dtype())));
  return copy.set_(bytes.storage(), 0, tensor.sizes(), tensor.strides());
}

/* The same host memory, which this does not keep: its owner does, as torch's allocator of pinned memory. */
inline Tensor unkept(const Tensor& host) {
  return at::from_blob(const_cast<void*>(host.const_data_ptr()), host.sizes(), host.strides(), host.options());
}

/* Work runs in whatever thread waits for it: its modes, and autograd, do not see it. */
struct Unseen {
  c10::impl::ExcludeDispatchKeyGuard python{
      c10::DispatchKeySet({c10::DispatchKey::Python, c10::DispatchKey::PythonTLSSnapshot})};
  at::AutoDispatchBelowADInplaceOrView autograd;
};

/* Operators whose results have a shape, or a value, that the host must know. */
inline const std::set<std::string> OF_VALUES = {
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::repeat_interleave.Tensor", "aten::histc"};

inline bool returns_tensors(const c10::OperatorHandle& op) {
  for (const auto& one : op.schema().returns())
    if (!one.type()->isSubtypeOf(*c10::TensorType::get()) && one.type()->kind() != c10::TypeKind::ListType) return false;
  return true;
}

/* One call of an operator, carried over to the host, and its results, carried back. Where streams run late it is called
 * twice: at once, on copies, for the shapes of its results, which get memory; and later, for their values. */
class HostCall {
 public:
  explicit HostCall(const c10::OperatorHandle& op) : op_(op), name_(toString(op.operator_name())) {}

  void operator()(torch::jit::Stack* stack) {
    const auto num_arguments = op_.schema().arguments().size();
    const torch::jit::Stack given(stack->end() - num_arguments, stack->end());
    torch::jit::drop(*stack, num_arguments);
    auto carried = carry(given, &twin_of);
    report(has_mask_ ? "mask" : "operator", name_, device());
    const auto here = stream_of(device());
    // Numbers are drawn once, in the order of the calls: ranks draw the same ones.
    if (late::streams.are_late() &&
        (has_mask_ || OF_VALUES.count(name_) || !returns_tensors(op_) || op_.hasTag(at::Tag::nondeterministic_seeded)))
      late::streams.reach(here);
    else if (late::streams.are_late())
      return call_late(stack, given, here);
    op_.callBoxed(&carried);
    follow_resizes(true);
    for (const auto& value : carried) stack->push_back(result(value, true));
  }

 private:
  using HostTensor = Tensor (*)(const Tensor&);

  c10::Device device() const { return twins_.empty() ? c10::Device(CUDA, current_device) : twins_[0].first.device(); }

  torch::jit::Stack carry(const torch::jit::Stack& values, HostTensor to_host) {
    twins_.clear();
    torch::jit::Stack carried;
    for (const auto& value : values) carried.push_back(argument(value, to_host));
    return carried;
  }

  void call_late(torch::jit::Stack* stack, const torch::jit::Stack& given, late::Place here) {
    auto tried = carry(given, &copy_of);
    op_.callBoxed(&tried);
    follow_resizes(false);
    for (const auto& value : tried) stack->push_back(result(value, false));
    const auto made = std::move(made_);
    late::streams.give(here, [op = op_, stack = carry(given, &twin_of), made] {
      const Unseen unseen;
      auto carried = stack;
      op.callBoxed(&carried);
      std::vector<Tensor> results;
      for (const auto& value : carried)
        for (const Tensor& tensor : value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector())
          results.push_back(tensor);
      for (size_t at = 0; at < made.size(); at++)
        if (made[at].defined()) made[at].copy_(results[at]);
    });
  }

  c10::IValue argument(const c10::IValue& value, HostTensor to_host) {
    if (value.isTensor()) return carried(value.toTensor(), to_host);
    if (value.isDevice() && value.toDevice().type() == CUDA) return c10::Device(c10::kCPU);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(carried(tensor, to_host));
      return list;
    }
    if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const auto& tensor : value.toOptionalTensorVector()) {
        has_mask_ |= tensor && (tensor->scalar_type() == at::kBool || tensor->scalar_type() == at::kByte);
        list.push_back(tensor ? std::optional<Tensor>(carried(*tensor, to_host)) : tensor);
      }
      return list;
    }
    return value;
  }

  Tensor carried(const Tensor& tensor, HostTensor to_host) {
    if (!is_here(tensor)) {
      TORCH_CHECK(!tensor.defined() || tensor.dim() == 0, name_, " got a tensor on ", tensor.device(), " beside one on a GPU");
      if (!tensor.defined() || !late::streams.are_late()) return tensor;
      Tensor number = tensor.clone();  // as it is now; of Python's ones the kind, which does not promote a dtype
      number.unsafeGetTensorImpl()->set_wrapped_number(tensor.unsafeGetTensorImpl()->is_wrapped_number());
      return number;
    }
    twins_.emplace_back(tensor, to_host(tensor));
    return twins_.back().second;
  }

  /* Give outputs the shapes that the host has given them. */
  void follow_resizes(bool with_values) {
    for (auto& [tensor, twin] : twins_)
      if (tensor.sizes() != twin.sizes()) {
        tensor.resize_(twin.sizes());
        if (with_values) twin_of(tensor).copy_(twin);
      }
  }

  c10::IValue result(const c10::IValue& value, bool with_values) {
    if (value.isTensor()) return to_device(value.toTensor(), with_values);
    if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& tensor : value.toTensorVector()) list.push_back(to_device(tensor, with_values));
      return list;
    }
    return value;
  }

  /* Return a result on the device. Without values, note where they go. */
  Tensor to_device(const Tensor& result, bool with_values) {
    made_.emplace_back();
    if (!result.defined()) return result;
    for (auto& [tensor, twin] : twins_) {
      if (result.is_same(twin)) return tensor;
      if (result.storage().is_alias_of(twin.storage()))
        return tensor.as_strided(result.sizes(), result.strides(), tensor.storage_offset() + result.storage_offset());
    }
    auto made = result.new_empty_strided(result.sizes(), result.strides(), result.options().device(device()));
    made_.back() = twin_of(made);
    if (with_values) made_.back().copy_(result);
    return made;
  }

  const c10::OperatorHandle& op_;
  std::string name_;
  bool has_mask_ = false;
  std::vector<std::pair<Tensor, Tensor>> twins_;
  std::vector<Tensor> made_;  // by result: a twin of the tensor that was made for it
};
