"""The server, by the official client over stdio."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from mcp import ClientSession, StdioServerParameters, stdio_client

T = TypeVar("T")
REPOSITORY = Path(__file__).resolve().parent.parent


def served(folder: Path, work: Callable[[ClientSession], Awaitable[T]]) -> T:
    """Result of a session with a server that was started in a folder."""

    async def session() -> T:
        server = StdioServerParameters(
            command=sys.executable,
            args=["-m", "orchestrator", "mcp"],
            cwd=str(folder),
            env={"PYTHONPATH": str(REPOSITORY), "HOME": str(Path.home()), "HF_HUB_OFFLINE": "1"},
        )
        async with stdio_client(server) as streams, ClientSession(*streams) as client:
            await client.initialize()
            return await work(client)

    return asyncio.run(session())


async def called(client: ClientSession, tool: str, **arguments: object) -> tuple[bool, Any]:
    """Whether a call failed, and its answer."""
    result = await client.call_tool(tool, arguments)
    text = result.content[0].text  # type: ignore[union-attr]
    return bool(result.is_error), text if result.is_error else json.loads(text)


def test_the_tools_are_read_only_and_read_no_file_outside(tmp_path: Path) -> None:
    """A mistake is one line; the folder holds nothing new afterwards."""
    outside = tmp_path / "secret.csv"
    outside.write_text("gpu,usd_per_hour\nA40,0.1\n")
    folder = tmp_path / "work"
    folder.mkdir()
    leads_out = {
        "base_model": "../secret",
        "datasets": [{"path": "a/b", "type": "alpaca"}],
        "sequence_len": 32,
        "adapter": "lora",
        "lora_r": 8,
        "lora_alpha": 16,
        "lora_target_linear": True,
        "micro_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "optimizer": "adamw_torch",
        "learning_rate": 0.0002,
    }
    (folder / "leads-out.yml").write_text(json.dumps(leads_out))

    async def work(client: ClientSession) -> None:
        tools = {tool.name: tool for tool in (await client.list_tools()).tools}
        assert set(tools) == {"estimate", "check", "rank", "prices"}
        assert all(one.annotations and one.annotations.read_only_hint for one in tools.values())
        failed, answer = await called(client, "prices", gpu="H100")
        assert not failed
        assert "H100-SXM" in answer["gpus"]
        rates = [one["usd_per_hour"] / one["gpus_per_instance"] for one in answer["offers"]]
        assert rates == sorted(rates)
        outsiders: list[dict[str, object]] = [
            {"model": "llama-tiny", "prices": str(outside)},
            {"model": "../x", "seq_len": 8},
            {"config": "leads-out.yml", "gpu": "A40"},
            {"config": "../none.yml", "gpu": "A40"},
        ]
        for options in outsiders:
            failed, text = await called(client, "check", options=options)
            assert failed
            assert "reads only files in" in text
        mistakes: list[tuple[str, dict[str, object]]] = [
            ("estimate", {"options": {"model": "llama-tiny", "export": "task.yaml"}}),
            ("estimate", {"options": {"seq_len": 8}}),
            ("rank", {"run": "none"}),
            ("prices", {"gpu": "H999"}),
        ]
        for tool, arguments in mistakes:
            failed, text = await called(client, tool, **arguments)
            assert failed
            assert "Traceback" not in text

    served(folder, work)
    assert [path.name for path in folder.iterdir()] == ["leads-out.yml"]


@pytest.mark.long
def test_an_estimate_and_a_ranking_are_answered(tmp_path: Path) -> None:
    """Headline and numbers; a run stays as it is."""
    from builders.runs import made_run  # noqa: PLC0415

    made_run(tmp_path / "run")

    async def work(client: ClientSession) -> None:
        options: dict[str, object] = {"model": "llama-tiny", "seq_len": 32, "lora_rank": 8}
        failed, answer = await called(client, "check", options=options | {"gpu": "A40"})
        assert not failed
        assert answer["check"]["fits"]
        options |= {"gpu": "A40,L4", "objective": "time"}
        failed, answer = await called(client, "estimate", options=options)
        assert not failed
        assert "The fastest" in answer["summary"]
        assert {row["gpu"] for row in answer["estimates"]} == {"A40", "L4"}
        failed, answer = await called(client, "rank", run="run", options={"examples": 80})
        assert not failed
        assert answer["all_offers"] >= len(answer["offers"]) > 0

    served(tmp_path, work)
