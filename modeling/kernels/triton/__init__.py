"""Kernels of attention for accelerators, in Triton: paged decode attention, prefill attention, appending of KV.

`decode`, `prefill` and `append` have the operators, which check their tensors and launch; `rows` says where a step's KV
lies; `tiles` chooses all block sizes. Triton is imported at the first call. It is an optional dependency
(`baton-serve[cuda]`). On `cuda` the decoder calls these kernels (`modeling.forward.triton.rows`, `triton_attention`).

None of this was run or measured on a GPU so far. Triton's interpreter runs the kernels on the CPU, where tests compare
them with float64 (tests/conformance/test_triton_kernels.py); Triton's compiler takes them for NVIDIA's architecture 9.0
without a GPU (tests/conformance/test_triton_compiler.py). So indexing, masks and sums are tested; speed, block sizes
and what the hardware does to rounding are not.

No operator reads from the device, and grids follow from shapes and from bounds that the host knows. So a launch can be
captured in a CUDA graph.
"""
