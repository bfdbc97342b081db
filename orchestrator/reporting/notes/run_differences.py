"""Settings and versions of packages in which two runs differ. Pure."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from orchestrator.run_folder.run_results import RunResults


def run_differences(before: RunResults, after: RunResults) -> list[tuple[str, str, str]]:
    """Name, value in the first run and value in the second of what differs, as text."""
    return [
        *_differing(_settings(before), _settings(after), _brief),
        *sorted(_differing(_packages(before), _packages(after), _listed)),
    ]


def _settings(results: RunResults) -> dict[str, object]:
    """Fields of the specification, without cells and catalogs; those of its records by name."""
    spec = results.spec
    settings: dict[str, object] = {
        name: getattr(spec, name) for name in ("seed", "max_batch_size", "boundary_repeats")
    }
    for name, record in (("timing", spec.timing), ("workload", spec.workload)):
        settings |= {f"{name}.{field}": value for field, value in record}
    return settings


def _packages(results: RunResults) -> dict[str, set[str]]:
    versions: defaultdict[str, set[str]] = defaultdict(set)
    for o in results.observed:
        if o.environment is not None:
            for package, version in (
                ("device", o.environment.device_name),
                *o.environment.versions,
            ):
                versions[package].add(version)
    return versions


def _differing(
    before: Mapping[str, Any], after: Mapping[str, Any], text: Callable[[Any], str]
) -> Iterator[tuple[str, str, str]]:
    """Values by name that differ, as text; one that is absent is None."""
    for name in {**before, **after}:
        pair = before.get(name), after.get(name)
        if pair[0] != pair[1]:
            yield name, text(pair[0]), text(pair[1])


def _brief(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _listed(versions: set[str] | None) -> str:
    return "; ".join(sorted(versions or ())) or "none"
