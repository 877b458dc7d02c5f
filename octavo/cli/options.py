"""Command-line flags and config files, both made from the fields of a config class."""

from __future__ import annotations

import dataclasses
import inspect
import tomllib
import types
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec
import typer

from octavo.config import ConfigError, EngineConfig, parse_size

C = TypeVar("C", bound=EngineConfig)

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", metavar="N", help="Most tokens to generate.")]
TopP = Annotated[float, typer.Option("--top-p", metavar="X", help="Draw among the likeliest that make up this share.")]
TopK = Annotated[int | None, typer.Option("--top-k", metavar="N", help="Draw among this many likeliest. 0: all.")]


def with_config(
    kind: type[C], first: str = "", only: Collection[str] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a command that takes `config: kind` first: it gains MODEL, --config and a flag for every field.

    A flag wins over the file, the file over the default. `first`: an argument of the command that comes before MODEL.
    `only`: the fields that make a difference to the command, where not all do; a file may have the others.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(command, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in list(inspect.signature(command).parameters.values())[1:]]
        fields = {f.name: f for f in dataclasses.fields(kind) if only is None or f.name in ("model", *only)}

        def run(**given: Any) -> None:
            file = given.pop("config_file")
            values = read_config(file, kind) if file else {}
            flags = {name: given.pop(name) for name in fields}
            values |= {name: value for name, value in flags.items() if value is not None and value != []}
            command(make_config(kind, values), **given)

        parameters = [_model_argument(fields["model"]), *own, _config_option()]
        types_of = get_type_hints(kind)
        parameters += [_flag(f, types_of[f.name]) for f in fields.values() if f.name != "model"]
        parameters.sort(key=lambda p: p.name != first)
        keyword = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in parameters]
        run.__signature__ = inspect.Signature(keyword)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in keyword}
        run.__doc__ = command.__doc__
        run.__name__ = command.__name__
        return run

    return decorate


def make_config(kind: type[C], values: dict[str, Any]) -> C:
    """Raises ConfigError, naming the option, for an unknown name or a bad value. Names may be written with dashes."""
    hints = get_type_hints(kind)
    checked: dict[str, Any] = {}
    for written, value in values.items():
        name = written.replace("-", "_")
        if name not in hints:
            raise ConfigError(f"there is no option {written!r}; there are {', '.join(sorted(hints))}")
        if _field(kind, name).metadata.get("size") and isinstance(value, str):
            value = parse_size(name, value)
        try:
            hint = str if get_origin(hints[name]) is Literal else hints[name]  # the config itself names the choices
            checked[name] = msgspec.convert(value, hint)
        except msgspec.ValidationError as e:
            raise ConfigError(f"{name}: {str(e).replace('`', '')}") from None
    return kind(**checked)


def read_config(path: Path, kind: type[EngineConfig]) -> dict[str, Any]:
    """Options of a .toml, .yaml or .yml file. Raises ConfigError naming the file."""
    try:
        text = path.read_text()
        if path.suffix == ".toml":
            values: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            import yaml

            try:
                values = yaml.safe_load(text) or {}
            except yaml.YAMLError as e:
                raise ValueError(" ".join(str(e).split())) from None
        else:
            raise ConfigError(f"{path}: a config file ends in .toml, .yaml or .yml")
    except (OSError, ValueError) as e:
        if isinstance(e, ConfigError):
            raise
        raise ConfigError(f"{path}: {e.strerror if isinstance(e, OSError) else e}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold options as 'name: value'")
    names = {f.name for f in dataclasses.fields(kind)}
    for written in values:
        if str(written).replace("-", "_") not in names:
            raise ConfigError(f"{path}: there is no option {written!r}; there are {', '.join(sorted(names))}")
    return {str(written).replace("-", "_"): value for written, value in values.items()}


def _field(kind: type[EngineConfig], name: str) -> dataclasses.Field[Any]:
    return next(f for f in dataclasses.fields(kind) if f.name == name)


def _model_argument(f: dataclasses.Field[Any]) -> inspect.Parameter:
    help = f"{f.metadata['help']} [default: {f.default}]"
    argument = typer.Argument(metavar="MODEL", help=help, show_default=False)
    return _parameter("model", Annotated[str | None, argument])


def _config_option() -> inspect.Parameter:
    option = typer.Option("--config", metavar="FILE", help="Read options from a TOML or YAML file; flags win over it.")
    return _parameter("config_file", Annotated[Path | None, option])


def _flag(f: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    flag = "--" + f.name.replace("_", "-")
    base = _without_none(hint)
    default: Any = f.default
    help = f.metadata["help"]
    metavar = None
    if base is bool:
        default = "on" if default else "off"
        flag = f"{flag}/--no-{f.name.replace('_', '-')}"
    elif f.metadata.get("size"):
        base, metavar = str, "SIZE"
    elif get_origin(base) is Literal:
        base, metavar = str, "|".join(get_args(base))  # checked by the config, with the same message everywhere
    elif base == tuple[str, ...]:
        base, metavar, default = list[str], "NAME=PATH", None
    elif base is int:
        metavar = "N"
    elif base is float:
        metavar = "SECONDS" if f.name.endswith("seconds") else "X"
    if default is not None:
        help = f"{help} [default: {default}]"
    option = typer.Option(flag, metavar=metavar, help=help, show_default=False)
    return _parameter(f.name, Annotated[base | None, option])


def _parameter(name: str, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, types.UnionType):
        (only,) = [t for t in get_args(hint) if t is not type(None)]
        return only
    return hint
