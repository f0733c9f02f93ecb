"""Parts of benchmarks.cuda: models of real shapes, rates of a machine, and what is measured beside them."""
