"""Traces on disk: made once, keyed by content, and replaced when damaged."""

import dataclasses
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from builders.observations import recipe

from gpu_catalog.catalog import load_catalog
from trials.recipes.recipe import Recipe
from trials.records.cell import Cell
from trials.records.compatibility import with_defaults
from trials.records.model import Model, find_model
from trials.simulation import trace_request, tracing_child
from trials.simulation.recording import Column, Kind
from trials.simulation.trace_cache import StepTrace, TraceError, Traces, read_trace
from trials.simulation.trace_request import TraceRequest, approximations, not_simulated
from trials.simulation.tracing_child import CHILDREN, TracingChildren, start_ahead

LORA = recipe("lora", precision="bf16")


def request_for(
    model: Model, settings: Recipe = LORA, *, gpu: str = "A40", seq_len: int = 16
) -> TraceRequest:
    """The request to trace a model for a simulated GPU."""
    cell = Cell(
        gpu=gpu,
        simulated=True,
        model=model.name,
        recipe=with_defaults(settings, model, load_catalog().gpu(gpu)),
        experts=model.experts,
        active_experts=model.active_experts,
        seq_len=seq_len,
    )
    return TraceRequest(cell=cell, model=model)


LLAMA = request_for(find_model("llama-tiny"))


def same(one: StepTrace, other: StepTrace) -> bool:
    """Return whether two traces are equal."""
    pairs = zip(one.recordings, other.recordings, strict=True)
    return (one.batch_sizes, one.copies) == (other.batch_sizes, other.copies) and all(
        np.array_equal(getattr(left, field.name), getattr(right, field.name))
        for left, right in pairs
        for field in dataclasses.fields(left)
    )


def test_a_process_is_started_ahead_where_there_is_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It serves request after request."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    CHILDREN.end()
    start_ahead("llama-tiny", 16)
    with CHILDREN.one() as child:
        pass
    with monkeypatch.context() as patched:
        patched.setattr(tracing_child, "TracingChild", None)  # there is no other
        assert Traces().get(LLAMA).batch_sizes == (2, 4)
        longer = request_for(find_model("llama-tiny"), seq_len=17)
        assert Traces().get(longer).batch_sizes == (2, 4)
        start_ahead("llama-tiny", 16)
        with CHILDREN.one() as same_child:
            pass
    assert same_child is child


def test_a_process_that_ended_while_idle_is_replaced(tmp_path: Path) -> None:
    """One ends after a minute without requests; another may be killed for its memory."""
    with CHILDREN.one() as child:
        pass
    (process,) = (p for p in psutil.Process().children() if p.pid == child.pid)
    process.kill()
    psutil.wait_procs([process])
    assert Traces(tmp_path).get(LLAMA).batch_sizes == (2, 4)
    with CHILDREN.one() as other:
        assert other is not child
    CHILDREN.end()
    assert not other.is_alive


def test_a_trace_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second process reads it from disk; a damaged file is replaced."""
    made = Traces(tmp_path).get(LLAMA)

    def no_more(*_: object, **__: object) -> None:
        raise AssertionError("nothing is to be traced")

    with monkeypatch.context() as patched:
        patched.setattr(TracingChildren, "one", no_more)
        assert same(Traces(tmp_path).get(LLAMA), made)
    (path,) = tmp_path.iterdir()
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(OSError, match="not a trace"):
        read_trace(path)
    assert same(Traces(tmp_path).get(LLAMA), made)
    assert Traces(tmp_path).get(LLAMA).parameters == made.parameters


def test_a_trace_does_not_depend_on_what_was_traced_before(tmp_path: Path) -> None:
    """Tracing another length first, or each size in its own process, gives the same trace."""
    longer = request_for(find_model("mixtral-tiny"), seq_len=32)
    after = Traces(tmp_path / "after", workers=1)
    after.prepare([request_for(find_model("mixtral-tiny")), longer])
    alone = Traces(tmp_path / "alone", workers=2).get(longer)
    assert same(after.get(longer), alone)
    assert [path.stem for path in (tmp_path / "alone").iterdir()] == [longer.key]


@pytest.mark.long
def test_processes_that_want_the_same_do_not_disturb_each_other(tmp_path: Path) -> None:
    """Each traces for itself until one has saved the trace."""
    with ThreadPoolExecutor(2) as threads:
        one, other = threads.map(lambda _: Traces(tmp_path, workers=2).get(LLAMA), range(2))
    assert same(one, other)
    assert [path.stem for path in tmp_path.iterdir()] == [LLAMA.key]


@pytest.mark.long
def test_tracing_ends_with_a_killed_estimate(tmp_path: Path) -> None:
    """Its traces are of no use any more, so the processes that make them end."""
    words = ("--model", "llama-3.1-70b", "--method", "full", "--gpu", "8xB300")
    words += ("--strategy", "deepspeed-zero3")
    with subprocess.Popen(
        [sys.executable, "-m", "orchestrator", "estimate", *words, "--seq-len", "64"],
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as estimate:
        tracing: list[psutil.Process] = []
        while len(tracing) < 3:  # one that imports, one that waits, and one that traces
            assert estimate.poll() is None
            time.sleep(0.1)
            tracing = psutil.Process(estimate.pid).children(recursive=True)
        assert any("tracing.bootstrap" in " ".join(process.cmdline()) for process in tracing)
        estimate.kill()
        _, alive = psutil.wait_procs(tracing, timeout=5)
    assert alive == []


def test_autocast_frees_its_casts_in_any_order(tmp_path: Path) -> None:
    """In fp16 only addresses distinguish them, so the step counts as the same."""
    trace = Traces(tmp_path).get(
        request_for(find_model("llama-tiny"), recipe("lora", precision="fp16"))
    )
    assert trace.batch_sizes == (2, 4)


def test_flash_attention_needs_no_mask_for_a_window(tmp_path: Path) -> None:
    """It takes as much memory as without a window; sdpa needs the mask."""
    llama = find_model("llama-tiny")
    mistral = {"model_type": "mistral", "sliding_window": 8}
    windowed = llama.model_copy(update={"config": llama.config | mistral})
    plain = llama.model_copy(update={"config": llama.config | mistral | {"sliding_window": None}})
    traces = Traces(tmp_path, workers=1)

    def windowed_request(model: Model, attention: str) -> TraceRequest:
        return request_for(model, recipe("lora", precision="bf16", attention=attention))

    def events(model: Model, attention: str) -> int:
        return len(traces.get(windowed_request(model, attention)).recordings[0].kinds)

    kernels = ("flash_attention_2", "sdpa")
    traces.prepare(
        [windowed_request(model, kernel) for model in (windowed, plain) for kernel in kernels]
    )
    assert events(windowed, "flash_attention_2") == events(plain, "flash_attention_2")
    assert events(windowed, "sdpa") > events(plain, "sdpa")


def test_fp32_with_shared_heads_keeps_every_score(tmp_path: Path) -> None:
    """No fused kernel supports both; one exists where heads are not shared."""
    llama = find_model("llama-tiny")
    heads = int(str(llama.config["num_attention_heads"]))
    shared = llama.model_copy(update={"config": llama.config | {"num_key_value_heads": heads // 2}})
    assert shared.has_grouped_queries
    assert not llama.has_grouped_queries
    traces = Traces(tmp_path, workers=1)

    def fp32_request(model: Model) -> TraceRequest:
        return request_for(model, recipe("lora", precision="fp32"), seq_len=512)

    def largest(model: Model) -> float:
        recording = traces.get(fp32_request(model)).recordings[0]
        return float(recording.numbers[recording.kinds == Kind.MADE, Column.BYTES].max())

    traces.prepare([fp32_request(shared), fp32_request(llama)])
    scores = 2 * 4 * 512 * 512 * heads
    assert largest(shared) == scores > largest(llama)


def test_positions_beyond_a_models_table_are_refused(tmp_path: Path) -> None:
    """A real step would fail at the lookup."""
    gpt2 = {"model_type": "gpt2", "vocab_size": 512, "n_positions": 32}
    model = Model(
        name="gpt2", source="here", config=gpt2 | {"n_embd": 64, "n_layer": 3, "n_head": 2}
    )
    traces = Traces(tmp_path, workers=1)
    full = recipe("full", precision="bf16")
    traces.prepare(
        [*(request_for(model, full, seq_len=length) for length in (32, 33)), request_for(model)]
    )
    assert traces.get(request_for(model, full, seq_len=32)).batch_sizes == (2, 4)
    with pytest.raises(TraceError, match="seq_len 33: gpt2 has positions for 32 tokens"):
        traces.get(request_for(model, full, seq_len=33))
    assert traces.get(request_for(model)).batch_sizes == (2, 4)


def test_substituted_kernels_are_reported_for_each_gpu() -> None:
    """PyTorch may choose other kernels on Hopper or in fp32, and a window is not applied."""
    mistral = find_model("mistral-7b")
    catalog = load_catalog()

    def notes(gpu: str, settings: Recipe, model: Model = mistral, seq_len: int = 16) -> str:
        cell = request_for(model, settings, gpu=gpu, seq_len=seq_len).cell
        return " ".join(approximations(cell, model, catalog.gpu(gpu)))

    half, single = (recipe("lora", precision=p, attention="sdpa") for p in ("bf16", "fp32"))
    assert "declared" in notes("A40", half)
    assert "declared" not in notes("H100-SXM", half)
    assert notes("A40", recipe("lora", precision="bf16", attention="eager")) == ""
    assert "cuDNN" in notes("H100-SXM", half)
    assert notes("H100-SXM", single) == ""  # in fp32 nothing fused has shared heads
    assert "memory-efficient" in notes("H100-SXM", single, find_model("llama-2-7b"))
    mamba = recipe("full", precision="bf16", mamba="mamba-ssm")
    assert "same shapes" in notes("A40", mamba, find_model("blackmamba-2.8b"))
    assert "slower code" in notes("A40", mamba, tiny("mamba2", state_size=4))
    windowed = mistral.model_copy(update={"config": mistral.config | {"sliding_window": 8}})
    assert "window of 8 tokens" in notes("A40", half, windowed)
    assert "window" not in notes("A40", half, windowed, seq_len=8)


def test_fallbacks_of_older_gpus_are_not_simulated() -> None:
    """DeepSpeed and, before Ampere, sdpa with shared heads are refused; eager is simulated."""
    mistral, catalog = find_model("mistral-7b"), load_catalog()
    v100, a40 = catalog.gpu("V100-16GB-SXM"), catalog.gpu("A40")
    sdpa = recipe("lora", precision="fp16", attention="sdpa")
    assert "use eager" in str(not_simulated(sdpa, mistral, v100))
    assert not_simulated(sdpa, mistral, a40) is None
    eager = recipe("lora", precision="fp16", attention="eager")
    assert not_simulated(eager, mistral, v100) is None
    offloaded = recipe("lora", precision="bf16", offload_optimizer=True)
    assert "deepspeed-zero2" in str(not_simulated(offloaded, mistral, a40))


def test_offloaded_casts_of_frozen_weights_are_not_simulated() -> None:
    """Recomputed layers save none, and weights in bf16 have none."""
    mistral, a40 = find_model("mistral-7b"), load_catalog().gpu("A40")

    def refusal(**fields: Any) -> str | None:
        return not_simulated(recipe("lora", activation_offloading=True, **fields), mistral, a40)

    assert "bf16-mixed" in str(refusal(precision="fp32-mixed-load"))
    assert refusal(precision="fp32-mixed-load", gradient_checkpointing=True) is None
    assert refusal(precision="bf16-mixed") is None


def test_a_trace_depends_on_everything_but_the_gpu() -> None:
    """Another GPU shares it; another length, recipe or configuration does not."""
    llama = find_model("llama-tiny")
    wider = llama.model_copy(update={"config": llama.config | {"vocab_size": 2048}})
    assert request_for(llama, gpu="H100-SXM").key == LLAMA.key
    others = [
        request_for(llama, seq_len=32),
        request_for(llama, recipe("lora", precision="bf16", gradient_checkpointing=True)),
        request_for(wider),
        LLAMA.model_copy(update={"batch_size": 1}),
    ]
    assert len({LLAMA.key, *(other.key for other in others)}) == 5


def test_updates_depend_on_the_package_of_their_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an update of torchao, neither a trace nor its updates are those of before."""
    torchao = request_for(find_model("llama-tiny"), recipe("full", optimizer="torchao_adamw_8bit"))
    before = {torchao.key, *torchao.digests_of_updates}
    monkeypatch.setattr(trace_request, "_version", lambda package: f"{package} of tomorrow")
    assert not before & {torchao.key, *torchao.digests_of_updates}


def test_batch_sizes_give_each_expert_whole_tokens() -> None:
    """This keeps traces affine between them: 2 of 8 experts at 17 tokens take 4 and 8."""
    mixtral = find_model("mixtral-tiny")
    assert request_for(mixtral, seq_len=17).batch_sizes == (4, 8)
    assert request_for(mixtral, seq_len=16).batch_sizes == (2, 4)
    assert LLAMA.batch_sizes == (2, 4)


def tiny(family: str, layers: int = 10, **config: object) -> Model:
    """A tiny model of a transformers family without a preset."""
    sizes = {"model_type": family, "vocab_size": 64, "hidden_size": 32}
    depth = {"num_hidden_layers": layers}
    return Model.model_validate({"name": family, "source": "", "config": sizes | depth | config})


HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
GEMMA = tiny("gemma2", 8, intermediate_size=64, sliding_window=8, **HEADS)
FULL = recipe("full", precision="bf16")
FLASH = recipe("full", precision="bf16", attention="flash_attention_2")


def test_an_untraceable_request_is_one_line(tmp_path: Path) -> None:
    """Custom code, kernels, configurations and lengths are among them; other requests continue."""
    llama = find_model("llama-tiny")
    own = tiny("own", auto_map={"AutoModelForCausalLM": "modeling_own.Own"})
    requests = {
        "llama-tiny .*offload_optimizer": request_for(
            llama, recipe("lora", precision="bf16", offload_optimizer=True)
        ),
        "^own: model_type 'own' is custom code .*auto_map.* is not run": request_for(own, FULL),
        "^lama: .* no model_type 'lama': did you mean 'llama'": request_for(tiny("lama"), FULL),
        "^t5: .* no causal language model of 't5'$": request_for(tiny("t5"), FULL),
        "sdpa: gemma2 .*use eager or flash_attention_2$": request_for(GEMMA, FULL),
        "flash_attention_2: gpt_oss .*FlashAttention-2.*use eager$": request_for(
            tiny("gpt_oss", num_local_experts=2, num_experts_per_tok=1, **HEADS),
            recipe("full", precision="bf16", attention="flash_attention_2"),
        ),
        "^experts grouped: llama4_text .*experts implementation.*use another model$": request_for(
            tiny("llama4_text", num_local_experts=2, num_experts_per_tok=1, **HEADS),
            recipe("full", precision="bf16", experts="grouped"),
        ),
        "^mamba2: .*refuses its configuration .*'chunk_size'.*int.*wide": request_for(
            tiny("mamba2", chunk_size="wide"), FULL
        ),
    }
    traces = Traces(tmp_path, workers=1)
    traces.prepare([*requests.values(), LLAMA])
    for pattern, request in requests.items():
        with pytest.raises(TraceError, match=pattern) as caught:
            traces.get(request)
        assert len(str(caught.value)) < 700
    assert traces.get(LLAMA).copies == 0  # two layers: nothing to repeat


def test_layers_that_cannot_stand_for_others_are_all_traced(tmp_path: Path) -> None:
    """A line says so, as for a different first layer or nested layers."""
    lines: list[str] = []
    mamba = tiny("mamba", 6, state_size=4, time_step_rank=4)
    mamba2 = tiny("mamba2", 6, state_size=4, head_dim=16, num_heads=4, n_groups=1)
    mamba2 = mamba2.model_copy(update={"config": mamba2.config | {"chunk_size": 8}})
    requests = [request_for(model, FULL) for model in (mamba, mamba2)]
    capped = request_for(GEMMA, FLASH)  # its layers repeat by twos
    traces = Traces(tmp_path, workers=1, report=lines.append)
    traces.prepare([*requests, capped])
    assert [traces.get(request).copies for request in (*requests, capped)] == [0, 0, 1]
    # A slow machine also reports the progress of a trace, with its tokens.
    whole = [line.partition(":")[0] for line in lines if "tokens:" not in line]
    assert whole == ["mamba", "mamba2"]


def test_an_unwritable_cache_folder_is_reported(tmp_path: Path) -> None:
    """The error has its name and the remedy."""
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    with pytest.raises(TraceError, match="XDG_CACHE_HOME"):
        Traces(blocked / "traces").get(LLAMA)


def test_tracing_needs_no_torch_until_it_traces() -> None:
    """Reading and replaying traces starts without torch."""
    program = "import sys, trials.simulation.simulated_prober; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "False"
