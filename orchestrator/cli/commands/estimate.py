"""Commands ``estimate`` and ``check``."""

import argparse
import json
import traceback
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpu_catalog.errors import UserError
from orchestrator.cli.commands.export import check_export, configured, export
from orchestrator.cli.options.clock import today
from orchestrator.console import brief_rows, print_file, print_result, remark

if TYPE_CHECKING:
    from orchestrator.configurations.configuration import Configuration
    from orchestrator.estimating.estimate_records import Alternative, Estimates
    from orchestrator.estimating.estimate_request import EstimateRequest

UNKNOWN = 2
"""Exit code of ``check`` where the verdict is unknown, as for a wrong command line."""


def run_estimate(options: argparse.Namespace) -> int:
    """Print the estimates.

    Returns:
        0 where a GPU is recommended; 1 where none can be estimated, the training fits none, or no
        offer is within the deadline and the budget.
    """
    if options.config is not None and options.explain_config:
        from orchestrator.configurations.local_data import with_chat_template, with_local_data
        from orchestrator.configurations.read_file import read_configuration

        explained = with_chat_template(read_configuration(options.config))
        print_result(with_local_data(explained).explanation())
        return 0
    request, configuration, remarks = _request(options)
    from orchestrator.estimating.assumed_lengths import with_assumed_lengths
    from orchestrator.estimating.estimate_job import estimate_job

    estimates = estimate_job(request, today())
    if not request.chooses_number:  # an answer for all GPUs takes long enough
        estimates = with_assumed_lengths(estimates)
    for text in (*remarks, *_export_remarks(options, estimates)):
        remark(text)
    _print_estimates(options, estimates, remarks)
    is_text = not (options.json or options.csv)
    if configuration is not None and is_text and not estimates.fits_any:
        from orchestrator.reporting.sections.alternative_recipes import cheapest_change

        if (cheapest := cheapest_change(estimates.estimated)) is not None:
            gpu, change = cheapest
            _print_keys(configuration, change, lead=f"\nTo fit {gpu}, in")
    if options.export is not None:
        from orchestrator.exporting.chosen_offers import estimated_training

        training = estimated_training(estimates, request)
        if options.config is not None:
            length = options.seq_len if isinstance(options.seq_len, int) else options.cutoff
            if options.seq_len == "max":
                length = training.seq_len
            training = configured(training, options.config, length)
        text = export(training, options.to, options.export)
        (print_result if is_text else remark)(text)
    return 0 if estimates.recommends else 1


def run_check(options: argparse.Namespace) -> int:
    """Print whether a training fits a GPU.

    Returns:
        0 where it fits, 1 where it does not, 2 where the verdict is unknown.
    """
    try:
        request, configuration, remarks = _request(options)
        from orchestrator.checking.memory_check import check_text, memory_check

        check = memory_check(request, today())
    except UserError as error:
        remark(str(error))
        if options.json:
            print_result(json.dumps({"fits": None, "reason": str(error)}, indent=2))
        return UNKNOWN
    except Exception:  # noqa: BLE001 - exit code 1 would say that the training does not fit
        traceback.print_exc()
        return UNKNOWN
    for text in remarks:
        remark(text)
    if options.json:
        from orchestrator.configurations.estimate_options import assumed_in

        assumed = (*check.assumed, *assumed_in(remarks))
        print_result(check.model_copy(update={"assumed": assumed}).model_dump_json(indent=2))
    else:
        print_result(check_text(check))
    if configuration is not None and check.change is not None and not options.json:
        _print_keys(configuration, check.change)
    if options.strict and not check.certain:
        return UNKNOWN
    return 0 if check.fits else 1


def _export_remarks(options: argparse.Namespace, estimates: "Estimates") -> Iterator[str]:
    """A line where the exported task cannot start the recommended offer."""
    if options.export is None:
        return
    from orchestrator.exporting.chosen_offers import refused_choice

    if (reason := refused_choice(estimates, options.to)) is not None:
        yield (
            f"{options.export} will start another offer than the one recommended below, which "
            f"{options.to} cannot start: {reason}"
        )


def _print_keys(configuration: "Configuration", change: "Alternative", lead: str = "In") -> None:
    """Print the keys of a trainer's configuration that make a change."""
    from orchestrator.configurations.keys_of_changes import keys_text

    trainer = configuration.trainer.rpartition(" ")[0]
    batches = change.batch_size, change.micro_batches
    print_result(keys_text(configuration.file, trainer, change.options, batches, lead))


def _request(
    options: argparse.Namespace,
) -> "tuple[EstimateRequest, Configuration | None, list[str]]":
    """The request of the options, a trainer's configuration, and remarks on what is assumed.

    Remarks are printed with the answer, so that a mistake stands alone. Starts a process that will
    trace the request.

    That process imports torch while this one imports the rest.

    Raises:
        UserError: the options or the configuration are wrong.
    """
    configuration: Configuration | None = None
    remarks: list[str] = []
    given: Mapping[str, Any] = vars(options)
    if options.config is not None:
        configuration, given, remarks = _with_config(options)
    if options.is_alone and isinstance(given["seq_len"], int):
        from trials.simulation.tracing_child import start_ahead

        start_ahead(given["model"], given["seq_len"])
    from orchestrator.estimating.choosing.layouts import names_by_count
    from orchestrator.estimating.estimate_request import (
        EstimateRequest,
        checks_of,
        without_electricity,
    )
    from orchestrator.model_names import shape_text
    from orchestrator.request import request_of

    if options.deepspeed is not None:
        given = _by_deepspeed(options, given)
    is_exported = options.command == "estimate" and options.export is not None
    request = request_of(EstimateRequest, given)
    if is_exported and options.config is not None and request.chooses_number:
        given = {**given, "gpus": 1}
        request = request_of(EstimateRequest, given)
    if configuration is not None:
        from orchestrator.configurations.layouts.several_gpus import on_several_gpus

        counts = names_by_count(request.gpu, request.counts)
        given = on_several_gpus(configuration, given, vars(options), counts)
        request = request_of(EstimateRequest, given)
    if options.command == "estimate":
        check_export(options)
    if options.refuse is not None:
        needed = without_electricity(request) if options.command == "check" else request
        options.refuse(checks_of(needed).lines)
    if request.image_tokens is None and (text := shape_text(request.model)):
        remarks.append(text)
    return request, configuration, remarks


def _by_deepspeed(options: argparse.Namespace, given: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the layout of a file of DeepSpeed, which replaces that of a configuration."""
    from orchestrator.configurations.layouts.deepspeed import read_deepspeed
    from orchestrator.request import OptionError

    if options.strategy is not None:
        raise OptionError("--deepspeed and --strategy exclude each other: give one")
    engine = read_deepspeed(options.deepspeed)
    options.strategy = engine.strategy
    return {**given, "strategy": engine.strategy, "zero": engine.zero}


def _print_estimates(
    options: argparse.Namespace, estimates: "Estimates", remarks: Iterable[str]
) -> None:
    from orchestrator.reporting.estimate_tables import (
        as_json,
        as_table,
        estimates_csv,
        explanation,
    )

    for reason in estimates.skipped:
        remark(reason)
    rows, is_one = estimates.estimated, len(estimates) + len(estimates.skipped) == 1
    if rows:
        remark(f"Prices: {estimates.prices}")
    if options.json:
        if rows or not is_one:
            from orchestrator.configurations.estimate_options import assumed_in

            assumed = assumed_in(remarks)
            print_result(as_json(rows, one=is_one, explain=options.explain, assumed=assumed))
    elif options.csv:
        print_file(estimates_csv(estimates))
    elif rows:
        print_result(as_table(rows, estimates.question, most=brief_rows()))
        if options.explain:
            for row in rows:
                print_result(f"\n{explanation(row)}")


def _with_config(options: argparse.Namespace) -> "tuple[Configuration, dict[str, Any], list[str]]":
    """The trainer's configuration, the options with those of it, and remarks on what it assumes."""
    from orchestrator.configurations.configuration import ConfigurationError
    from orchestrator.configurations.estimate_options import with_configuration
    from orchestrator.configurations.local_data import with_chat_template, with_local_data
    from orchestrator.configurations.read_file import read_configuration
    from orchestrator.spec.job_request import SOURCES

    configuration = with_chat_template(read_configuration(options.config))
    if options.image_tokens is not None:
        configuration = configuration.with_images()
    configuration.check()
    has_lengths = options.dataset or options.length_histogram
    if not has_lengths and (options.seq_len is None or isinstance(options.seq_len, int)):
        configuration = with_local_data(configuration)
    given, remarks = with_configuration(configuration, vars(options))
    is_sized = any(map(given.get, ("examples", "steps", *SOURCES)))
    if options.command == "estimate" and configuration.data_fault is not None and not is_sized:
        raise ConfigurationError(
            f"{configuration.file}: {configuration.data_fault}: correct it, or give --dataset or "
            "--examples"
        )
    return configuration, given, remarks
