"""Parts of `benchmarks.cuda`: models of real shapes, measurements of a machine's rates, and the measurements that are
compared with these rates."""
