"""Serves any checkpoint to clients of the OpenAI protocol.

    python -m experiments.serve --model smollm2-135m-instruct --port 8000
    python -m experiments.serve --model path/to/checkpoint --quantize_bits 8 --slots 16

Then, for example:

    curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
      -d '{"messages": [{"role": "user", "content": "What is the capital of France?"}]}'
    lm_eval --tasks arc_easy --model local-completions --model_args \\
      model=NAME,base_url=http://localhost:8000/v1/completions,tokenizer=PATH,num_concurrent=8

Needs the extra `serve`. Anyone who reaches the port can use the model: it listens on this machine
only unless --host says otherwise.
"""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
import socket
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import ml_collections

from experiments.errors import UsageError, suggest

DEFAULT_MAX_LENGTH = 2048


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(message[0].upper() + message[1:] + ".")


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is asked to end; returns the exit status, 2 for a usage error."""
    try:
        serve(parse(sys.argv[1:] if argv is None else list(argv)))
        return 0
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def parse(argv: list[str]) -> argparse.Namespace:
    """The options of a command line.

    Raises:
      UsageError: an unknown one, a missing --model, or a value that cannot be.
    """
    parser = _Parser(
        prog="experiments.serve",
        description=__doc__,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", help="a checkpoint folder or file, a hub id, or `tiny`")
    parser.add_argument("--name", help="what clients call it (default: the end of --model)")
    parser.add_argument("--tokenizer", help="another than the checkpoint's: folder, file or byte")
    parser.add_argument("--chat", default="auto", help="chat template: auto, always or never")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (%(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 = a free one (%(default)s)")
    parser.add_argument("--slots", type=int, default=8, help="sequences at once (%(default)s)")
    parser.add_argument(
        "--max_length",
        type=int,
        help=f"tokens of prompt and answer (the model's, at most {DEFAULT_MAX_LENGTH})",
    )
    parser.add_argument(
        "--max_open", type=int, default=512, help="sequences that run or wait (%(default)s)"
    )
    parser.add_argument(
        "--max_body", type=int, default=4 * 2**20, help="bytes of a request (%(default)s)"
    )
    parser.add_argument(
        "--quantize_bits", type=int, default=0, help="round weights to 8 or 4 bits; 0: leave them"
    )
    parser.add_argument("--group_size", type=int, default=32, help="of quantisation (%(default)s)")
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        known = [action.option_strings[-1] for action in parser._actions if action.option_strings]
        name = unknown[0].partition("=")[0]
        raise UsageError(f"unknown argument {unknown[0]!r}.{suggest(name, known)}")
    if not options.model:
        raise UsageError("give --model: a checkpoint folder or file, a hub id, or `tiny`.")
    for name in ("slots", "max_open", "max_body"):
        if getattr(options, name) < 1:
            raise UsageError(f"--{name}={getattr(options, name)}: expected at least 1.")
    if not 0 <= options.port < 2**16:
        raise UsageError(f"--port={options.port}: expected 0 to {2**16 - 1}.")
    return options


def serve(options: argparse.Namespace) -> None:
    """Loads the model and answers until SIGINT or SIGTERM; open requests are finished first.

    Raises:
      UsageError: the model cannot be loaded or given such slots, or the port is taken.
    """
    missing = [name for name in ("starlette", "uvicorn") if not importlib.util.find_spec(name)]
    if missing:
        raise UsageError(f"{missing[0]} is missing: pip install 'jaxllm[serve]'.")
    import uvicorn

    app = build(options)
    listening = listen(options.host, options.port)
    host, port = listening.getsockname()[:2]
    # Once the application has started, which is where uvicorn accepts connections.
    print(f"serving {app.state.server.model.name} on http://{host}:{port}/v1", flush=True)
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=60)
    uvicorn.Server(config).run(sockets=[listening])


def build(options: argparse.Namespace) -> Any:
    """The application of a command line, its model loaded and the decoding step compiled."""
    from experiments import generate
    from jaxllm.inference.engine import Request
    from jaxllm.serving import app as app_lib

    names = ("model", "tokenizer", "chat", "quantize_bits", "group_size")
    loaded = generate.load(
        ml_collections.ConfigDict({name: getattr(options, name) for name in names})
    )
    most = loaded.config.max_positions
    max_length = options.max_length or min(most, DEFAULT_MAX_LENGTH)
    if not 2 <= max_length <= most:
        raise UsageError(f"--max_length={max_length}: the model takes 2 to {most} tokens.")
    app = app_lib.create_app(
        app_lib.ServedModel(
            name=options.name or pathlib.PurePath(options.model).name,
            config=loaded.config,
            params=loaded.params,
            tokenizer=loaded.tokenizer,
            template=loaded.template,
        ),
        app_lib.Limits(options.slots, max_length, options.max_open, options.max_body),
    )
    app.state.server.engine.run([Request([0], min(3, max_length - 1), stop_tokens=())])
    return app


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
      UsageError: the port is taken, or there is no such address.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=512)
    except (OSError, OverflowError) as error:
        raise UsageError(f"cannot listen on {host}:{port}: {error}.") from error


if __name__ == "__main__":
    sys.exit(main())
