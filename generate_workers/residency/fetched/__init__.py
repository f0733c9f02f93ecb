"""InfiniGen where KV lives in home memory, and a device computes with what is fetched of it."""
