"""Commands that the package `baton_lab` adds to the `baton` command line. Heavy imports are deferred until a command
runs."""

from baton_lab.bench import command as bench
from baton_lab.chaos import command as chaos
from baton_lab.forecasts import plan, simulate
from baton_lab.quality import evaluate
from baton_lab.traffic import command as traffic

COMMANDS = (plan, simulate, traffic, evaluate, chaos, bench)
