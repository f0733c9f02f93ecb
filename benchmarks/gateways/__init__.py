"""Processes that run orchestrators, HTTP gateways, scripted engines and clients for the benchmark
`benchmarks.gateway`."""
