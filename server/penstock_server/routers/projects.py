"""Plans of jobs, and projects: what would be placed where, and who may use how much."""

from __future__ import annotations

import re
from typing import Annotated

from fastapi import Path, Response

from penstock.protocol.jobspec import NAME
from penstock_server.auth.principal import READ, by_project, scoped
from penstock_server.description import problems
from penstock_server.guard import require_project
from penstock_server.problems import NotFound
from penstock_server.routers.deps import TAGGED, Asker, Id, IfTag, Server, tag_of
from penstock_server.routers.guarded import guarded_router
from penstock_server.routers.jobs import SUBMIT
from penstock_server.schemas import api

Name = Annotated[str, Path(pattern=NAME)]
router = guarded_router("/api/v1", tag="projects")


@router.post("/jobs:plan", operation_id="planJob", tags=["jobs"])
@scoped("submit")
@by_project
async def plan_job(server: Server, asker: Asker, body: api.Submission) -> api.Plan:
    """Say where a job would be placed now, or why it would wait; with a reason for each node. Nothing is reserved."""
    require_project(asker, body.spec.project, SUBMIT)
    return await server.plans.of(body.spec)


@router.get("/projects", operation_id="listProjects")
@scoped("read")
@by_project
async def list_projects(server: Server, asker: Asker) -> api.Items[api.Project]:
    """List the projects that have a share or quotas of their own, or jobs that run or wait."""
    return api.Items(items=await server.projects.all(asker.projects_with(READ)))


@router.get("/projects/{project}", operation_id="getProject", responses=TAGGED)
@scoped("read")
@by_project
async def get_project(server: Server, asker: Asker, response: Response, project: Id) -> api.Project:
    """Return one project; one without terms and jobs has the share and the quotas that each begins with."""
    if re.fullmatch(NAME, project) is None or not asker.may_in(project, READ):
        raise NotFound("project", project)
    return _tagged(response, await server.projects.get(project))


@router.put("/projects/{project}", operation_id="setProject", responses=problems(412))
@scoped("admin")
async def set_project(
    server: Server, response: Response, project: Name, body: api.ProjectTerms, if_match: IfTag = None
) -> api.Project:
    """Give a project a share and quotas, in place of those that it has. What runs goes on."""
    return _tagged(response, await server.projects.put(project, body, tag=tag_of(if_match)))


def _tagged(response: Response, project: api.Project) -> api.Project:
    response.headers["ETag"] = f'"{project.etag}"'
    return project
