"""`penstock`: the tree of the commands in `penstock.command`, whose errors become one message and an exit code
(docs/cli.md). Imports no torch.
"""

from __future__ import annotations

import sys
from typing import Annotated

from penstock.imports import importing

with importing():
    import typer

    from penstock.command import (
        advise,
        audit,
        cluster,
        cluster_kubernetes,
        cluster_ray,
        completeness,
        convert,
        doctor,
        draining,
        export,
        fluid,
        graphpasses,
        jobs,
        nodes,
        projects,
        pythonstack,
        recording,
        serve,
        tables,
        webhooks,
    )
    from penstock.command.exits import exit_of
    from penstock.errors import PenstockError
    from penstock.version import __version__

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Train with Penstock, and watch it.\n\nExit codes: 0 ok, 1 job failed, 2 usage, 3 not found, 4 auth, "
    "5 conflict, 6 unavailable, 7 timeout.",
)


def _version(value: bool) -> None:
    if value:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Options that stand before the command."""


app.command("up")(serve.up)
app.command("demo")(serve.demo)
app.command("backup")(serve.backup)
app.command("restore")(serve.restore)
app.command("submit")(jobs.submit)
app.command("plan")(projects.plan)
app.command("jobs")(jobs.list_jobs)
app.command("job")(jobs.show_job)
app.command("logs")(jobs.logs)
app.command("cancel")(jobs.cancel)
app.command("wait")(jobs.wait_for)
app.command("exchange")(jobs.exchange)
app.command("tables")(tables.tables)
app.command("passes")(graphpasses.passes)
app.command("completeness")(completeness.completeness)
app.command("why")(jobs.why)
app.command("stack")(pythonstack.stack)
app.command("record")(recording.record)
app.command("advise")(advise.advise)
app.command("export")(export.export)
app.command("nodes")(nodes.nodes)
app.command("audit")(audit.audit)
app.command("doctor")(doctor.doctor)
app.command("run-fluid", context_settings=fluid.RUN_SETTINGS)(fluid.run_fluid)
app.command("check-fluid")(fluid.check_fluid)
app.command("convert-fluid")(convert.convert_fluid)
app.command("login-link")(nodes.login_link)
app.add_typer(projects.project_commands, name="project")
app.add_typer(draining.node_commands, name="node")
app.add_typer(webhooks.webhook_commands, name="webhooks")
app.add_typer(nodes.token_commands, name="token")
app.add_typer(nodes.agent_commands, name="agent")
cluster.cluster_commands.command("kubernetes")(cluster_kubernetes.kubernetes)
cluster.cluster_commands.command("ray")(cluster_ray.ray)
app.add_typer(cluster.cluster_commands, name="cluster")


def main() -> None:
    """Run the command that the arguments name; exits."""
    try:
        app()
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        sys.exit(exit_of(error))
    except BrokenPipeError:  # `penstock logs … | head`
        sys.stderr.close()
        sys.exit(0)


if __name__ == "__main__":
    main()
