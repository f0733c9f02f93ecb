"""What a client receives besides tokens, as values: completions, and how their stages ran. All are frozen and safe to
share between threads."""
