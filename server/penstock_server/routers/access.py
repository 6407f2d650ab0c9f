"""Tokens, login codes and browser sessions."""

from __future__ import annotations

from typing import Annotated

from fastapi import Query, Request, Response
from sqlalchemy import select

from penstock.errors import Bug
from penstock_server import tags
from penstock_server.auth.principal import Principal, authenticated, by_project, scoped, unauthenticated
from penstock_server.auth.secrets import TokenKind
from penstock_server.auth.tokens import SESSION_S, Minted
from penstock_server.description import problems
from penstock_server.guard import count_wrong, origin_allowed, require_project
from penstock_server.problems import NotFound, Problem
from penstock_server.routers.deps import TAGGED, Asker, Id, IfTag, PageSize, PageToken, Server, tag_of
from penstock_server.routers.guarded import guarded_router
from penstock_server.runtime import Runtime
from penstock_server.schemas import api, tokens
from penstock_server.services.audit import Visible
from penstock_server.services.pages import DEFAULT_SIZE
from penstock_server.services.views import columns
from penstock_server.tables import TokenRow

router = guarded_router("/api/v1", tag="access")

MAX_TIME_S = 4_102_444_800.0  # 2100
TIME = "seconds since 1970, UTC; `until_s` is not included"
ADMIN = frozenset({"admin"})


@router.get("/me", operation_id="getMe")
@authenticated
async def get_me(asker: Asker) -> tokens.Me:
    """Return the principal of the request."""
    return tokens.Me(name=asker.name, scopes=sorted(asker.scopes), projects=asker.projects)


@router.post("/tokens", status_code=201, operation_id="createToken")
@scoped("admin")
@by_project
async def create_token(server: Server, asker: Asker, response: Response, body: tokens.TokenRequest) -> tokens.TokenMade:
    """Make a token; its secret is in this answer and nowhere else.

    One of `scopes`, `role` (in all projects) and `projects` (a role in each) is given. An administrator of projects
    makes tokens for these, which last no longer than its own.
    """
    if asker.projects is not None:
        if body.projects is None:
            raise Problem(
                403, "restricted_token", f"token {asker.name!r} makes tokens for projects alone",
                hint=f"give 'projects', of {', '.join(sorted(asker.projects_with(ADMIN) or ()))}",
            )  # fmt: skip
        for project in body.projects:
            require_project(asker, project, ADMIN)
    async with server.database.write() as tx:
        ends = None if asker.projects is None else await server.tokens.end_of(tx, asker)
        minted = server.tokens.mint(
            tx, "user", body.name, body.granted(), expires_in_s=body.expires_in_s, expires_by=ends,
            projects=body.projects,
        )  # fmt: skip
    shown = _shown(server, minted.row)
    response.headers["ETag"] = f'"{shown.etag}"'
    return tokens.TokenMade(**shown.model_dump(), token=minted.secret)


def _shown(server: Runtime, row: TokenRow) -> tokens.Token:
    used = server.tokens.last_used(row)
    made = {**columns(tokens.Token, row), "last_used_at": used, "etag": tags.of_token(row.revoked_at)}
    return tokens.Token(**made)


@router.get("/audit", operation_id="listAudit")
@scoped("admin")
@by_project
async def list_audit(
    server: Server,
    asker: Asker,
    token: Annotated[str | None, Query(max_length=255, description="its id or name", examples=["admin"])] = None,
    subject: Annotated[str | None, Query(max_length=255, description="what was changed", examples=["default"])] = None,
    since_s: Annotated[float | None, Query(ge=0, le=MAX_TIME_S, description=TIME, examples=[1_767_225_600])] = None,
    until_s: Annotated[float | None, Query(ge=0, le=MAX_TIME_S, description=TIME, examples=[1_767_312_000])] = None,
    page_size: PageSize = DEFAULT_SIZE,
    page_token: PageToken = None,
) -> api.Page[api.AuditEntry]:
    """List the requests that changed something, and refused ones beyond the limit of wrong tokens; newest first.

    An administrator of projects sees what was done to their jobs, to their tokens, and to them.
    """
    only = None if asker.projects is None else await _visible(server, asker)
    return await server.audit.page(
        by=token, subject=subject, since_s=since_s, until_s=until_s, size=page_size, token=page_token, only=only
    )


async def _visible(server: Server, asker: Principal) -> Visible:
    known = {row.id for row in await _tokens(server, asker)}
    return Visible(asker.projects_with(ADMIN) or frozenset(), known)


async def _tokens(server: Server, asker: Principal) -> list[TokenRow]:
    """Return the tokens that a principal manages, oldest first: those of nodes and clusters only without projects."""
    statement = select(TokenRow).where(TokenRow.kind.in_(["user", "node", "pilot"])).order_by(TokenRow.id)
    async with server.database.read() as session:
        rows = (await session.execute(statement)).scalars().all()
    mine = asker.projects_with(ADMIN)
    return [row for row in rows if mine is None or (row.projects is not None and mine.issuperset(row.projects))]


@router.get("/tokens", operation_id="listTokens")
@scoped("admin")
@by_project
async def list_tokens(server: Server, asker: Asker) -> api.Items[tokens.Token]:
    """List tokens of people and nodes, and join tokens of clusters, oldest first, without their secrets.

    An administrator of projects sees those that are for these alone.
    """
    rows = await _tokens(server, asker)
    return api.Items(items=[_shown(server, row) for row in rows])


@router.get("/tokens/{token_id:id}", operation_id="getToken", responses=TAGGED)
@scoped("admin")
@by_project
async def get_token(server: Server, asker: Asker, response: Response, token_id: Id) -> tokens.Token:
    """Return one token, without its secret."""
    row = next((row for row in await _tokens(server, asker) if row.id == token_id), None)
    if row is None:
        raise NotFound("token", token_id)
    response.headers["ETag"] = f'"{tags.of_token(row.revoked_at)}"'
    return _shown(server, row)


@router.delete("/tokens/{token_id:id}", status_code=204, operation_id="revokeToken", responses=problems(409, 412))
@scoped("admin")
@by_project
async def revoke_token(server: Server, asker: Asker, token_id: Id, if_match: IfTag = None) -> None:
    """Revoke a token for good, and end the browser sessions that were opened by it."""
    if asker.projects is not None and token_id not in {row.id for row in await _tokens(server, asker)}:
        raise NotFound("token", token_id)
    await server.tokens.revoke(token_id, tag=tag_of(if_match))


@router.post("/join-tokens", status_code=201, operation_id="createJoinToken")
@scoped("admin")
async def create_join_token(server: Server, body: api.JoinTokenRequest | None = None) -> api.OneTimeToken:
    """Make a token with which one node can join, or, if it is reusable, any number of them."""
    asked = body or api.JoinTokenRequest()
    kind: TokenKind = "pilot" if asked.reusable else "join"
    async with server.database.write() as tx:
        minted = server.tokens.mint(tx, kind, "join token", [], expires_in_s=asked.expires_in_s)
    return api.OneTimeToken(id=minted.row.id, token=minted.secret, expires_at=_expiry(minted))


@router.post("/login-codes", status_code=201, operation_id="createLoginCode")
@scoped("read")
@by_project
async def create_login_code(server: Server, asker: Asker) -> api.LoginCode:
    """Make a code that opens one browser session: `/login#code=<code>`.

    The session may do what the token may that asked for it, and ends with that.
    """
    async with server.database.write() as tx:
        minted = await server.tokens.login(tx, asker)
    return api.LoginCode(code=minted.secret, expires_at=_expiry(minted))


@router.post("/session", status_code=204, operation_id="openSession", responses=problems(401, 403, 429))
@unauthenticated  # the code in the body is what opens it, once
async def open_session(server: Server, request: Request, response: Response, body: api.SessionRequest) -> None:
    """Turn a login code into a session cookie."""
    origin = request.headers.get("origin")
    host, extra = request.headers.get("host"), server.settings.allowed_origins
    if origin is not None and not origin_allowed(origin, scheme=request.url.scheme, host=host, extra=extra):
        raise Problem(403, "foreign_origin", f"a page of {origin!r} may not log in here")
    async with server.database.write() as tx:
        minted = await server.tokens.open_session(tx, body.code)
        if minted is None:
            count_wrong(request, server)
            raise Problem(
                401,
                "login_code_refused",
                "the login code is unknown, expired or used",
                hint="make a new one with `penstock login-link`",
            )
    response.set_cookie(
        server.tokens.cookie,
        minted.secret,
        max_age=int(SESSION_S),
        httponly=True,
        samesite="strict",
        secure=request.url.scheme == "https",
    )


@router.delete("/session", status_code=204, operation_id="closeSession")
@authenticated
async def close_session(server: Server, asker: Asker, response: Response) -> None:
    """End the session of this cookie."""
    if asker.kind == "session":
        await server.tokens.revoke(asker.token_id)
    response.delete_cookie(server.tokens.cookie, httponly=True, samesite="strict")


def _expiry(minted: Minted) -> api.Timestamp:
    if minted.row.expires_at is None:
        raise Bug("a one-time token was made without an expiry: report it")
    return minted.row.expires_at
