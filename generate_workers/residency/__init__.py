"""Storage of a generation group's KV, and access to it by steps. The package has an interface (`port`) and the
residency policies that implement it."""
