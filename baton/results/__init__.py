"""Values that a client receives in addition to tokens: completions, and the times of a request's stages. All classes
are frozen dataclasses, so threads may share their objects."""
