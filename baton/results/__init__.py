"""Values that a client receives in addition to tokens: completions, and how their stages ran. All are frozen and safe
to share between threads."""
