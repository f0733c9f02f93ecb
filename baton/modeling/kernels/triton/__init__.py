"""Triton kernels for accelerators: paged decode attention, prefill attention, appending of KV, and sampling.

`decode`, `spans`, `prefill` and `append` contain the operators, which check their tensors and launch kernels. `spans`
is prefill attention over pages, and `prefill` over contiguous segments. `sampler` draws the next tokens. `row_kernels`
describes the KV of a step's sequences, `tiles` chooses the block sizes of attention, and `launch` launches all kernels.
Triton is an optional dependency (`baton-serve[cuda]`) and is imported at the first call. On the device `cuda`, the
decoder calls these kernels (`baton.modeling.forward.triton.triton_rows`, `baton.modeling.forward.triton.attention`).

Tests without a GPU cover indexing, masks and sums. Triton's interpreter runs the kernels on the CPU, and the results
are compared with float64 (tests/conformance/test_triton_kernels.py). Triton's compiler compiles them for NVIDIA's
architecture 9.0 (tests/conformance/test_triton_compiler.py). Speed and the hardware's rounding are tested on GPUs only
(tests/cuda; docs/devices.md, "What a GPU reached").

Triton compiles a kernel when it is launched for the first time with arguments of a new kind. Integers that differ
between steps are separate arguments that are not specialised, because Triton specialises all integers in a tuple. The
set of kernels of an engine is therefore small, and `generate_workers.compiling` compiles it in advance.

No operator reads results from the device. Grids depend only on shapes and on bounds that the host knows, so a CUDA
graph can capture a launch.
"""
