"""Kernels of attention for accelerators, in Triton: paged decode attention, prefill attention, appending of KV.

`decode`, `prefill` and `append` have the operators, which check their tensors and launch. `rows` describes the KV of a
step's sequences, and `tiles` chooses all block sizes. Triton is imported at the first call. It is an optional
dependency (`baton-serve[cuda]`). On `cuda` the decoder calls these kernels
(`baton.modeling.forward.triton.triton_rows`, `baton.modeling.forward.triton.attention`).

Without a GPU, Triton's interpreter runs the kernels on the CPU, where tests compare them with float64
(tests/conformance/test_triton_kernels.py), and Triton's compiler accepts them for NVIDIA's architecture 9.0
(tests/conformance/test_triton_compiler.py). So indexing, masks and sums are tested there. Speed and the hardware's
rounding are tested on GPUs only (tests/cuda; docs/devices.md, "What a GPU reached").

No operator reads from the device. Grids follow from shapes and from bounds that the host knows, so that a launch can be
captured in a CUDA graph.
"""
