"""Configuration in a Python file of TRL, whose literals are read without running it."""

import ast
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.configurations.key_classes import Computed
from orchestrator.configurations.trainers.trl_tasks import CLASSES, TRAINER_CLASS, TRAINING_DATA

LORA_KEYS = {
    "r": "lora_r",
    "target_modules": "lora_target_modules",
    "target_parameters": "lora_target_parameters",
    "modules_to_save": "lora_modules_to_save",
    "task_type": "lora_task_type",
}
"""Names of PEFT's ``LoraConfig`` that TRL's command line calls otherwise."""
LORA_DEFAULTS = {"use_peft": True, "lora_r": 8, "lora_alpha": 8, "lora_dropout": 0.0}
"""Defaults of PEFT 0.21, which are not those of TRL's command line."""
QUANTISATION_KEYS = {"bnb_4bit_use_double_quant": "use_bnb_nested_quant"}
QUANTISATION_DEFAULTS = {"bnb_4bit_quant_type": "fp4"}
MODEL_KEYS = frozenset({"dtype", "torch_dtype", "attn_implementation"})
REPLACING = frozenset({"compute_loss_func", "optimizers", "optimizer_cls_and_kwargs"})
"""Arguments of a trainer that replace what its configuration states."""
LOADED_DTYPE = "auto"
"""Dtype that transformers 5 loads weights in unless it is stated; TRL loads them in fp32."""
KBIT = "prepare_model_for_kbit_training"
LOAD = "load_dataset"
LOAD_ARGUMENTS = ("path", "name", "data_dir", "data_files", "split")
"""First arguments of ``datasets.load_dataset``."""
SAME_EXAMPLES = frozenset({"shuffle", "flatten_indices"})
SELECT, SPLIT = "select", "train_test_split"
"""Methods of a data set of which the first examples, or those beside a test set, are taken."""
HALVES = "halves"  # of an entry whose training part is still to be taken
SPLIT_OFF = 0.25  # of the examples, unless a file states the size of either part


class PythonFileError(ValueError):
    """The file has no configuration that can be read; one line says why."""


def python_configuration(text: str) -> Mapping[str, Any]:
    """Keys of TRL's command line that are equal to the calls in a Python file.

    They are those of ``SFTConfig`` and its like, ``LoraConfig``, ``BitsAndBytesConfig``,
    ``from_pretrained`` and ``load_dataset``. A value is a literal, a name that the file assigns one
    literal, or ``Computed``.

    Raises:
        PythonFileError: it is no Python, or has not one configuration of a trainer.
    """
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError) as error:
        number = getattr(error, "lineno", None)
        line = f" in line {number}" if number else ""
        raise PythonFileError(f"is not Python: {error.args[0]}{line}") from None
    calls = _calls(tree)
    names = _assigned(tree)
    if "GRPOConfig" in calls and not calls.keys() & set(CLASSES):
        raise PythonFileError(
            "is of GRPO, whose files are not read: give --task grpo without --config"
        )
    kind, config = _only(calls, tuple(CLASSES))
    values: dict[str, Any] = _keywords(config, names) | {TRAINER_CLASS: kind}
    values |= _model(calls, names)
    initial = values.pop("model_init_kwargs", None)
    if isinstance(initial, dict):
        values |= {name: initial.pop(name) for name in MODEL_KEYS & set(initial)}
    if initial:
        values["model_init_kwargs"] = initial
    if "LoraConfig" in calls:
        given = _keywords(_only(calls, ("LoraConfig",))[1], names)
        values |= LORA_DEFAULTS | {LORA_KEYS.get(name, name): v for name, v in given.items()}
    if "BitsAndBytesConfig" in calls:
        given = _keywords(_only(calls, ("BitsAndBytesConfig",))[1], names)
        renamed = {QUANTISATION_KEYS.get(name, name): v for name, v in given.items()}
        values |= QUANTISATION_DEFAULTS | renamed
    if KBIT in calls:
        values[KBIT] = True
    for call in _trainers(calls):
        own = {word.arg: _value(word.value, names) for word in call.keywords}
        values |= {name: own[name] for name in REPLACING & set(own) if own[name] is not None}
    if data := _data(calls, names, _assigned_in_order(tree)):
        values[TRAINING_DATA] = data
    return values


def _calls(tree: ast.AST) -> dict[str, list[ast.Call]]:
    """Calls of a file by the last part of the function's name."""
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _last_part(node.func)):
            calls.setdefault(name, []).append(node)
    return calls


def _last_part(function: ast.expr) -> str | None:
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else None


def _only(calls: Mapping[str, list[ast.Call]], names: tuple[str, ...]) -> tuple[str, ast.Call]:
    """The one call of a function, with its name."""
    matches = [(name, call) for name in names for call in calls.get(name, [])]
    if len(matches) != 1:
        text = f"{len(matches)} calls of {' or '.join(names)}"
        raise PythonFileError(f"has {text}: give a file with one")
    return matches[0]


def _assigned(tree: ast.AST) -> dict[str, ast.expr]:
    """Values of the names that a file binds once, by a plain assignment."""
    bound: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.setdefault(node.id, []).append(None)
        elif isinstance(node, ast.arg):
            bound.setdefault(node.arg, []).append(None)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name) and len(bound[target.id]) == 1:
                bound[target.id] = [node.value]
    return {
        name: value
        for name, values in bound.items()
        if len(values) == 1 and (value := values[0]) is not None
    }


def _assigned_in_order(tree: ast.AST) -> dict[str, list[ast.Assign]]:
    """Assignments of each name that one function alone, or the file itself, binds by them."""
    stores = Counter(
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    )
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    by_name: dict[str, list[ast.Assign]] = {}
    for block in ast.walk(tree):
        if not isinstance(block, (ast.Module, ast.FunctionDef)):
            continue
        own: dict[str, list[ast.Assign]] = {}
        for line in block.body:
            if isinstance(line, ast.Assign) and isinstance(line.targets[0], ast.Name):
                own.setdefault(line.targets[0].id, []).append(line)
        by_name |= {name: lines for name, lines in own.items() if len(lines) == stores[name]}
    return {name: lines for name, lines in by_name.items() if name not in arguments}


def _keywords(call: ast.Call, names: Mapping[str, ast.expr]) -> dict[str, Any]:
    values = {str(word.arg or "**"): _value(word.value, names) for word in call.keywords}
    return values | {f"argument {i}": Computed("by place") for i, _ in enumerate(call.args[1:], 2)}


def _value(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """Value of a literal, of a dtype of torch, or of a name that stands for one of them."""
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch":
        return node.attr
    if isinstance(node, ast.Call) and _last_part(node.func) == "dict" and not node.args:
        return {str(word.arg): _value(word.value, names) for word in node.keywords}
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = (ast.literal_eval(key) for key in node.keys if key is not None)
        values = (_value(value, names) for value in node.values)
        return dict(zip(keys, values, strict=True))
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError):
        return Computed(ast.unparse(node))


def _model(calls: Mapping[str, list[ast.Call]], names: Mapping[str, ast.expr]) -> dict[str, Any]:
    """The model that the trainer is given: by its name, or loaded by ``from_pretrained``."""
    loads = [call for call in calls.get("from_pretrained", []) if _loads_a_model(call)]
    if len(loads) > 1:
        first, *others = ({**_loaded(call, names)} for call in loads)
        if any(other != first for other in others):  # a reference is the same model
            raise PythonFileError("loads several models: give a file that loads one")
    if loads:
        return _loaded(loads[0], names)
    for call in _trainers(calls):
        given = [word.value for word in call.keywords if word.arg == "model"]
        for model in [*call.args[:1], *given]:  # the first argument of every trainer is its model
            return {"model_name_or_path": _value(model, names)}
    return {}


def _data(
    calls: Mapping[str, list[ast.Call]],
    names: Mapping[str, ast.expr],
    assigned: Mapping[str, list[ast.Assign]],
) -> list[dict[str, Any]]:
    """Entries of ``datasets`` that load the trainer's data; a computed one has no other key."""
    words = {word.arg: word.value for call in _trainers(calls) for word in call.keywords}
    rendering = _value(words.get("formatting_func", ast.Constant(None)), names)
    if rendering is not None:
        return [{"path": Computed("formatting_func")}]
    data = words.get(TRAINING_DATA)
    reader = _DataReader(names, assigned)
    return [reader.entry(node) for node in (calls.get(LOAD, []) if data is None else [data])]


@dataclass(frozen=True, slots=True)
class _DataReader:
    """Reads how a file makes a data set: loaded, shuffled, cut, and split from a test set.

    Attributes:
        names: values of the names that the file binds once.
        assigned: assignments of names in their order.
    """

    names: Mapping[str, ast.expr]
    assigned: Mapping[str, list[ast.Assign]]

    def entry(self, node: ast.expr) -> dict[str, Any]:
        """Arguments of ``load_dataset``, its split, and ``most`` and ``set_aside`` of a job."""
        made = self.read(node)
        return {"path": Computed(ast.unparse(node))} if made is None or HALVES in made else made

    def read(self, node: ast.expr) -> dict[str, Any] | None:
        """The entry so far; None where the file has to run for it."""
        if isinstance(node, ast.Name):
            return self._named(node)
        if isinstance(node, ast.Subscript):
            return self._part(node)
        if isinstance(node, ast.Call) and _last_part(node.func) == LOAD:
            return self._loaded(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            made = self.read(node.func.value)
            return None if made is None else self._changed(made, node.func.attr, node)
        return None

    def _named(self, node: ast.Name) -> dict[str, Any] | None:
        """The entry that a name stands for: what it is assigned last before, or anywhere, once."""
        lines = [line.value for line in self.assigned.get(node.id, ())]
        before = [value for value in lines if (value.end_lineno or 0) < node.lineno]
        if before:
            return self.read(before[-1])
        if node.id not in self.names:
            return None
        names, assigned = dict(self.names), dict(self.assigned)
        value = names.pop(node.id)  # so that no name stands for itself
        assigned.pop(node.id, None)
        return replace(self, names=names, assigned=assigned).read(value)

    def _loaded(self, call: ast.Call) -> dict[str, Any]:
        values = (_value(argument, self.names) for argument in call.args)
        entry = dict(zip(LOAD_ARGUMENTS, values, strict=False))
        entry |= {str(word.arg): _value(word.value, self.names) for word in call.keywords}
        return {name: value for name, value in entry.items() if value is not None}

    def _changed(self, made: dict[str, Any], method: str, call: ast.Call) -> dict[str, Any] | None:
        """The entry after a method of the data set."""
        if method in SAME_EXAMPLES:
            return made
        is_whole = not made.keys() & {"most", "set_aside"}
        if method == SELECT and is_whole and (most := _range(call, self.names)):
            return made | {"most": most}
        if method == SPLIT and "set_aside" not in made and (size := self._test_size(call)):
            return made | {"set_aside": size, HALVES: True}
        return None

    def _part(self, node: ast.Subscript) -> dict[str, Any] | None:
        """The part that is trained on of two halves, or a split of what is loaded."""
        whole, name = self.read(node.value), _value(node.slice, self.names)
        if whole is not None and HALVES in whole:
            return {k: v for k, v in whole.items() if k != HALVES} if name == "train" else None
        return None if whole is None or "split" in whole else whole | {"split": name}

    def _test_size(self, call: ast.Call) -> float | None:
        own = {word.arg: _value(word.value, self.names) for word in call.keywords}
        size = own.get("test_size", SPLIT_OFF)
        size = _value(call.args[0], self.names) if call.args else size
        is_number = isinstance(size, (int, float)) and not isinstance(size, bool)
        return size if is_number and "train_size" not in own else None


def _range(call: ast.Call, names: Mapping[str, ast.expr]) -> int | None:
    """Number of examples of ``select(range(number))``; None for others."""
    (argument, *others) = (*call.args, *(word.value for word in call.keywords)) or (None,)
    if isinstance(argument, ast.Call) and _last_part(argument.func) == "range" and not others:
        values = [_value(node, names) for node in argument.args]
        if len(values) == 1 and type(values[0]) is int and values[0] > 0:
            return values[0]
    return None


def _loads_a_model(call: ast.Call) -> bool:
    owner = call.func.value if isinstance(call.func, ast.Attribute) else call.func
    name = _last_part(owner) or ""
    return "Model" in name or name.endswith("ForCausalLM")


def _loaded(call: ast.Call, names: Mapping[str, ast.expr]) -> dict[str, Any]:
    words = _keywords(call, names)
    stated = {name: value for name, value in words.items() if name in MODEL_KEYS}
    if not stated.keys() & {"dtype", "torch_dtype"}:
        stated["dtype"] = LOADED_DTYPE
    first = call.args[0] if call.args else None
    model = words.get("pretrained_model_name_or_path") if first is None else _value(first, names)
    return stated | {"model_name_or_path": model}


def _trainers(calls: Mapping[str, list[ast.Call]]) -> Iterator[ast.Call]:
    for name, matches in calls.items():
        if name.endswith("Trainer"):
            yield from matches
