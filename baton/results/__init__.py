"""Values that a client receives in addition to tokens: completions, and the times of their stages. All are frozen, so
threads may share them."""
