"""Kernels of attention for accelerators, in Triton: paged decode attention, prefill attention, appending of KV.

`decode`, `prefill` and `append` have the operators, which check their tensors and launch. `rows` describes the KV of a
step's sequences, and `tiles` chooses all block sizes. Triton is imported at the first call. It is an optional
dependency (`baton-serve[cuda]`). On `cuda` the decoder calls these kernels (`modeling.forward.triton.rows`,
`triton_attention`).

None of this was run or measured on a GPU so far. Triton's interpreter runs the kernels on the CPU, where tests compare
them with float64 (tests/conformance/test_triton_kernels.py). Triton's compiler accepts them for NVIDIA's architecture
9.0 without a GPU (tests/conformance/test_triton_compiler.py). So indexing, masks and sums are tested. Speed, block
sizes and the hardware's rounding are not.

No operator reads from the device. Grids follow from shapes and from bounds that the host knows, so that a launch can be
captured in a CUDA graph.
"""
