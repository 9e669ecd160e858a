"""`nanollm serve`: OpenAI's API over HTTP."""

import argparse
import dataclasses
import os
from pathlib import Path

from nanollm.commands.flags import MODEL_HELP, add_engine_flags, default_model, engine_args


def add_flags(parser: argparse.ArgumentParser) -> None:
    """The server's, then all of EngineConfig."""
    parser.add_argument("model", nargs="?", help=MODEL_HELP)
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="interface to listen on (default: %(default)s)")
    server.add_argument("--port", type=int, default=8000, help="0 takes a free one (default: %(default)s)")
    server.add_argument("--served-model-name", help="what clients call the model; default: as it is called here")
    server.add_argument("--api-key", help="what clients must bring; default: $NANOLLM_API_KEY, which no `ps` shows")
    server.add_argument("--allowed-origins", nargs="+", default=[], help="web sites that may call from a browser")
    server.add_argument("--chat-template", type=Path, help="file with the template to use instead of the model's")
    server.add_argument(
        "--max-waiting", type=int, default=1024, help="most sequences in the queue; beyond: 429 (default: %(default)s)"
    )
    server.add_argument("--request-timeout", type=seconds, help="seconds that a request may take; default: 0, no limit")
    server.add_argument(
        "--shutdown-timeout", type=seconds, default=30.0, help="seconds to finish after SIGTERM (default: %(default)s)"
    )
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until told to stop."""
    from nanollm.server.app import ServerOptions, serve

    given = {name: value for name, value in vars(args).items() if value is not None}
    given["api_key"] = os.environ.get("NANOLLM_API_KEY") if args.api_key is None else args.api_key
    if given["api_key"] is not None and not given["api_key"].strip():
        raise ValueError("the API key is empty: leave out --api-key, and unset NANOLLM_API_KEY, to let everybody in")
    options = ServerOptions(**{f.name: given[f.name] for f in dataclasses.fields(ServerOptions) if f.name in given})
    model = args.model or default_model()
    if args.model is None and options.served_model_name is None:
        options.served_model_name = Path(model).name
    return serve(model, options, engine_args(args))


def seconds(text: str) -> float:
    """A time that can be waited for: no NaN, nothing that overflows."""
    if not 0 <= (value := float(text)) <= 1e6:
        raise argparse.ArgumentTypeError(f"must be from 0 to 1000000 seconds, got {text}")
    return value
