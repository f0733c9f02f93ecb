"""Parts of benchmarks.cuda: models of real shapes, a machine's rates, and the measurements compared with them."""
