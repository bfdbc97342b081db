"""Models to fine-tune: Hugging Face configurations and the sources of their facts.

No torch here. Layers, shapes and parameters are read from the module that transformers builds from
the configuration on the meta device (``trials.models.build``).
"""

import datetime as dt
import math
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, JsonValue, ValidationError, model_validator

from gpu_catalog.errors import UserError
from gpu_catalog.record import Record
from gpu_catalog.suggestions import did_you_mean, near_matches
from gpu_catalog.user_file import NestingError, json_of, text_of

# Keys of these facts in configurations of transformers; the first present one counts.
ATTENTION_NAMES = ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads")
EXPERTS_NAMES = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERTS_NAMES = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
LAYERS_NAMES = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
SIZE_NAMES = ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
POSITIONS_NAMES = ("max_position_embeddings", "n_positions")
VISION, TEXT = "vision_config", "text_config"
OTHER_SENSES = ("audio_config", "vision_encoder")
"""Keys of parts that read sound, or images in another way."""
HUB_TIMEOUT_SECONDS = 5.0  # for one request to the hub
STATE_SIZE_NAMES = ("state_size", "mamba_d_state", "ssm_state_size")
MOST_LAYERS = 1_000
"""Far beyond any published model: more would take hours to trace or build."""
MOST_EXPERTS = 4_096
"""Most experts of a layer, likewise."""
SIZE = re.compile(r"size|dim|rank|head|width|channels|embd|inner|expand|state|d_model|d_ff|dff")
"""What keys of sizes have in their names, in configurations of transformers."""
MOST_SIZE = 10_000_000
"""Far beyond the size of any published model, and of its vocabulary."""


# transformers' notation for numbers that JSON lacks (the infinite limit of a Mamba's time steps).
FLOAT_TAG = "__float__"
FLOAT_TAGS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


class UnknownModelError(UserError):
    """No preset, folder with a config.json or model of the hub has this name."""


def _tagged(value: Any) -> Any:
    """Write infinities and NaN in transformers' notation; pydantic would write them as null."""
    if isinstance(value, dict):
        return {key: _tagged(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_tagged(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        sign = "-" if value < 0 else ""
        return {FLOAT_TAG: "NaN" if math.isnan(value) else f"{sign}Infinity"}
    return value


def _untagged(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {FLOAT_TAG}:
            return FLOAT_TAGS.get(str(value[FLOAT_TAG]), value)
        return {key: _untagged(item) for key, item in value.items()}
    return [_untagged(item) for item in value] if isinstance(value, list) else value


def _sizes(config: Any) -> Iterator[tuple[str, int]]:
    """Whole numbers that state a size, with their keys, in all parts of a configuration."""
    if isinstance(config, list):
        for item in config:
            yield from _sizes(item)
    elif isinstance(config, dict):
        for key, value in config.items():
            if not isinstance(value, int):
                yield from _sizes(value)
            elif SIZE.search(key):
                yield key, value


class Model(Record):
    """A causal language model by its configuration, or a vision-language model.

    Attributes:
        name: name in specifications and observations.
        aliases: other names of the same model.
        source: source of the configuration.
        recorded: date of a preset's facts; absent for a user's own model.
        weights: folder or hub name of pretrained weights; absent for none.
        published_parameters: parameter count stated by its publisher; absent for none.
        published_rounding: unit that this count is rounded to; absent when it is exact.
        published_in: source of the count.
        config: content of config.json.
    """

    name: str
    aliases: tuple[str, ...] = ()
    source: str
    recorded: dt.date | None = None
    weights: str | None = None
    published_parameters: Annotated[int, Field(strict=True, gt=0)] | None = None
    published_rounding: Annotated[int, Field(strict=True, gt=0)] | None = None
    published_in: str | None = None
    config: Annotated[dict[str, JsonValue], BeforeValidator(_tagged)]

    @model_validator(mode="after")
    def _is_a_language_model(self) -> "Model":
        other = next((key for key in OTHER_SENSES if self.config.get(key) is not None), None)
        if other is not None:
            raise ValueError(
                f"a {self.config.get('model_type')} reads more than text and images ({other}), "
                "which is not estimated. For its language part alone give its text_config as a "
                "config.json of its own, and count the other tokens in --seq-len"
            )
        self._check_parts()
        # transformers has a size of its own where that of a part is absent.
        for key in ("model_type",) if self.has_vision else ("model_type", "vocab_size"):
            if self.config.get(key) is None:
                raise ValueError(
                    f"its configuration has no {key}: give the config.json of a Hugging Face "
                    "causal language model"
                )
        if (self.experts is None) != (self.active_experts is None):
            raise ValueError("its configuration has experts but not how many are active per token")
        if self.experts and not 1 <= (self.active_experts or 0) <= self.experts:
            raise ValueError(
                f"its configuration routes a token to {self.active_experts} of {self.experts} "
                f"experts: it must be 1 to {self.experts}"
            )
        # The others are read where they are first needed, which is too late for a clear message.
        _ = self.has_grouped_queries, self.window, self.positions
        _ = None if self.has_vision else self.vocab_size
        self._check_sizes()
        return self

    def _check_parts(self) -> None:
        """Refuse parts that are no dictionaries, and a language part without a tower.

        Raises:
            ValueError: in one line.
        """
        for key in (VISION, TEXT):
            if not isinstance(self.config.get(key) or {}, dict):
                # pydantic reports no TypeError.
                raise ValueError(f"its {key} is {self.config[key]!r}: it must be a dictionary")  # noqa: TRY004
        if isinstance(self.config.get(TEXT), dict) and not self.has_vision:
            raise ValueError(
                f"a {self.config.get('model_type')} without a vision tower is its language model: "
                f"give its {TEXT} as a config.json of its own"
            )

    def _check_sizes(self) -> None:
        """Refuse sizes of 0, and any far beyond those of published models.

        Raises:
            ValueError: in one line.
        """
        for name in (name for name in SIZE_NAMES if self.text.get(name) is not None):
            if not self._whole(name):
                raise ValueError(f"{name} is 0: it must be at least 1")
        layers = self._first(LAYERS_NAMES)
        if layers is not None and self._whole(layers) > MOST_LAYERS:
            raise ValueError(f"{layers} is {self._whole(layers)}: at most {MOST_LAYERS} are read")
        if (self.experts or 0) > MOST_EXPERTS:
            raise ValueError(f"{self.experts} experts in a layer: at most {MOST_EXPERTS} are read")
        for name, size in _sizes(self.config):
            if size > MOST_SIZE:
                raise ValueError(f"{name} is {size}: at most {MOST_SIZE} are read")

    @property
    def family(self) -> str:
        """``model_type`` of transformers."""
        return str(self.config["model_type"])

    @property
    def has_vision(self) -> bool:
        """Whether it reads images beside text, by a vision tower."""
        return self.config.get(VISION) is not None

    @property
    def tower_family(self) -> str | None:
        """``model_type`` of its vision tower; None where the family determines it, or without."""
        part = self.config.get(VISION)
        family = part.get("model_type") if isinstance(part, dict) else None
        return None if family is None else str(family)

    @property
    def text(self) -> dict[str, Any]:
        """Configuration of its language part, which some have beside that of the tower."""
        part = self.config.get(TEXT) if self.has_vision else None
        return part if isinstance(part, dict) else self.config

    @property
    def vocab_size(self) -> int:
        """Number of tokens in the vocabulary."""
        return self._whole("vocab_size")

    @property
    def experts(self) -> int | None:
        """Experts per layer; None for a model without experts."""
        name = self._first(EXPERTS_NAMES)
        count = None if name is None else self._whole(name)
        return count if count is not None and count > 1 else None

    @property
    def active_experts(self) -> int | None:
        """Experts the model itself routes each token to; None for a model without experts."""
        if self.experts is None:
            return None
        name = self._first(ACTIVE_EXPERTS_NAMES)
        return None if name is None else self._whole(name)

    @property
    def has_attention(self) -> bool:
        """Whether any layer attends: all classes with vision do, stated or not."""
        return self.has_vision or self._first(ATTENTION_NAMES) is not None

    @property
    def has_grouped_queries(self) -> bool:
        """Whether several query heads share one head of keys and values."""
        name, shared = self._first(ATTENTION_NAMES), "num_key_value_heads"
        if name is None or self.text.get(shared) is None:
            return False
        return self._whole(shared) < self._whole(name)

    @property
    def window(self) -> int | None:
        """Sliding window of attention in tokens; None for attention to all earlier tokens."""
        name = "sliding_window"
        off = self.text.get("use_sliding_window") is False
        return None if self.text.get(name) is None or off else self._whole(name)

    @property
    def has_mamba(self) -> bool:
        """Whether any layer is a selective scan."""
        return self._first(STATE_SIZE_NAMES) is not None

    @property
    def positions(self) -> int | None:
        """Longest sequence the model was made for, in tokens; None when not stated."""
        name = self._first(POSITIONS_NAMES)
        return None if name is None else self._whole(name)

    def config_with(self, active_experts: int | None) -> dict[str, Any]:
        """Configuration with this number of experts active for each token."""
        config: dict[str, Any] = _untagged(self.config)
        name = self._first(ACTIVE_EXPERTS_NAMES)
        if active_experts is not None and name is not None:
            (config if self.text is self.config else config[TEXT])[name] = active_experts
        return config

    def _first(self, names: tuple[str, ...]) -> str | None:
        text = self.text
        return next((name for name in names if text.get(name) is not None), None)

    def _whole(self, name: str) -> int:
        value = self.text[name]
        if not isinstance(value, int) or value < 0:
            raise ValueError(f"{name} is {value!r}: it must be a whole number of 0 or more")
        return value


@cache
def presets() -> dict[str, Model]:
    """Shipped presets by name, in alphabetical order and without aliases.

    ``nulls`` of a file are keys of the configuration that are null, which TOML cannot write.

    Raises:
        ValueError: a preset file does not describe a model; the message names the file.
    """
    models = {}
    folder = resources.files("trials.records") / "presets"
    for file in sorted(folder.iterdir(), key=lambda path: path.name.removesuffix(".toml")):
        try:
            raw = tomllib.loads(file.read_text(encoding="utf-8"))
            raw["config"] |= dict.fromkeys(raw.pop("nulls", ()))
            preset = Model.model_validate(raw)
        except (ValidationError, tomllib.TOMLDecodeError) as error:
            raise ValueError(f"{file.name}: {error}") from error
        models[preset.name] = preset
    return models


def find_model(name: str, *, reads_images: bool = False) -> Model:
    """Find a model by the name of a preset, a configuration file, a folder or a hub name.

    It is a language model, or with ``reads_images`` a vision-language model.

    A name that ends in ``.json`` is a configuration without weights. A name that starts with ``.``,
    ``/`` or ``~`` is a folder with a config.json. A name with a single ``/`` is looked up on the
    hub (the local cache first).

    Raises:
        UnknownModelError: there is no such model, or it is one of the other kind; one line names
            the attempt and the remedy.
    """
    model = _find(name)
    if (reason := wrong_senses(model, reads_images=reads_images)) is not None:
        raise UnknownModelError(f"model {name!r}: {reason}")
    return model


def wrong_senses(model: Model, *, reads_images: bool) -> str | None:
    """Reason why a model is not of the kind that is needed; None where it is."""
    if model.has_vision and not reads_images:
        return (
            f"a {model.family} reads images ({VISION}), which is only estimated: give estimate or "
            "check --image-tokens N, the tokens of each example that come from images; to train on "
            f"text alone, give its {TEXT} as a config.json of its own"
        )
    if reads_images and not model.has_vision:
        return (
            f"a {model.family} reads text alone: leave --image-tokens out, or give the config.json "
            "of a vision-language model by --model-config"
        )
    return None


def _find(name: str) -> Model:
    for preset in presets().values():
        if name == preset.name or name in preset.aliases:
            return preset
    if name.endswith(".json"):
        return _from_config(name, Path(name).expanduser(), weights=None)
    if name.startswith((".", "/", "~")):
        return _from_config(name, Path(name).expanduser() / "config.json", weights=name)
    if (Path(name) / "config.json").is_file():
        # Observations keep the name, so it must not mean a folder here and a hub name elsewhere.
        raise UnknownModelError(f"model {name!r} is a folder here: write ./{name}")
    if name.count("/") == 1:
        return _from_hub(name)
    near = did_you_mean(name, presets()) or f": the known ones are {', '.join(presets())}."
    raise UnknownModelError(
        f"unknown model {name!r}{near} A folder with a config.json is ./NAME, a hub name OWNER/NAME"
    )


def hub_is_reached() -> bool:
    """Whether the hub answers. Its own libraries take a minute to report that it does not."""
    from huggingface_hub import constants, get_session  # noqa: PLC0415 - only this needs them

    if constants.HF_HUB_OFFLINE:
        return False
    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT_SECONDS)
    except Exception:  # noqa: BLE001 - any failure of the network means no hub
        return False
    return True


def _from_hub(name: str) -> Model:
    from huggingface_hub import hf_hub_download  # noqa: PLC0415 - only this needs the network
    from huggingface_hub.errors import HfHubHTTPError  # noqa: PLC0415 - as above

    is_reached = hub_is_reached()
    try:
        path = hf_hub_download(name, "config.json", local_files_only=not is_reached)
    except (HfHubHTTPError, OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        if not is_reached:
            first = "it cannot be reached, and the local cache has none"
        near = near_matches(name.partition("/")[2], presets())
        similar = f"{'Similar presets' if near else 'Presets'}: {', '.join(near or presets())}"
        raise UnknownModelError(
            f"model {name!r}: no config.json from the hub ({first}): check the name, the network "
            "and HF_TOKEN, or give a folder with a config.json, or the file itself by "
            f"--model-config (estimate, check). {similar}"
        ) from None
    return _from_config(name, Path(path), weights=name)


def _from_config(name: str, path: Path, *, weights: str | None) -> Model:
    try:
        config = json_of(text_of(path, lambda line: UnknownModelError(f"model {name!r}: {line}")))
    except NestingError as error:
        raise UnknownModelError(f"model {name!r}: {path} {error}") from None
    except ValueError as error:
        raise UnknownModelError(f"model {name!r}: {path} is not JSON: {error}") from None
    try:
        return Model(name=name, source=str(path), weights=weights, config=config)
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UnknownModelError(f"model {name!r}: {path}: {problem}") from None
