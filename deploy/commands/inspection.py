"""Implements `baton config`, which prints the resulting configuration, and `baton doctor`, which checks whether this
machine can run it."""

import argparse
import sys
from pathlib import Path


def add_config_options(parser: argparse.ArgumentParser) -> None:
    """Add the options --config and --set to a command that needs the cluster's configuration."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    text = "setting that overrides --config; may be repeated; `baton config` lists all settings"
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help=text)


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the `config` and `doctor` commands to the command line."""
    config = commands.add_parser(
        "config",
        help="print all settings with their values and meanings",
        description="Prints all settings with their values and meanings, as TOML. The values are the defaults, unless "
        "--config or --set gives others. If the sections [prefill] and [generate] define no pools, `baton serve` and "
        "`baton doctor` choose ranks, threads and cores for this machine instead of the printed defaults.",
    )
    add_config_options(config)
    config.set_defaults(run=print_config)
    doctor = commands.add_parser(
        "doctor",
        help="check whether a cluster can run on this machine, and measure the machine's speed",
        description="Checks whether the configured cluster can run on this machine: versions, model, devices, cores, "
        "memory, /dev/shm, kernels and ports. Then measures for a few seconds the rates that limit the speed of "
        "generation: computation and memory bandwidth. The exit status is 1 if a check has failed.",
    )
    add_config_options(doctor)
    doctor.set_defaults(run=print_findings)


def print_config(args: argparse.Namespace) -> int:
    """Run `baton config`: print the resulting configuration. Return the exit status."""
    # Imported here and below, so that the command line is answered without pydantic or torch.
    from deploy.config.file import format_config, load_config

    sys.stdout.write(format_config(load_config(args.config, args.set)))
    return 0


def print_findings(args: argparse.Namespace) -> int:
    """Run `baton doctor`: check the machine and print the results. Return 1 if a check failed, else 0."""
    from rich.console import Console
    from rich.table import Table

    from deploy.config.file import read_config
    from deploy.machine.arrangement import arrange
    from deploy.machine.doctor import Finding, Verdict, examine, measure_kernels, measure_rates
    from deploy.machine.model_folder import resolve_drafts, resolve_folder
    from deploy.machine.resolved_model import ResolvedModel
    from deploy.machine.this_machine import prepare_machine

    written, console = read_config(args.config, args.set), Console(stderr=True)
    section = written.config.model
    model = ResolvedModel(resolve_folder(section.name, section.cache, console))
    machine = prepare_machine(console)
    plan = resolve_drafts(arrange(written, model, machine), console)
    findings = examine(plan, machine)
    text = plan.why or f"as configured: {plan.config.num_workers} workers"
    findings.append(Finding("arrangement", Verdict.OK, text))
    if not plan.config.ray.address:
        with console.status("measuring kernels and memory"):
            findings += [measure_kernels(), measure_rates(plan, machine)]
    colours = {Verdict.OK: "green", Verdict.WARNING: "yellow", Verdict.FAILED: "red"}
    table = Table(box=None, show_header=False)
    for finding in findings:
        table.add_row(finding.name, f"[{colours[finding.verdict]}]{finding.verdict.value}[/]", finding.text)
    Console().print(table)
    return 1 if any(finding.verdict is Verdict.FAILED for finding in findings) else 0
