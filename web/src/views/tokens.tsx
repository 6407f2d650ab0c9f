/** Tokens: who may do what in which project; made and revoked here by administrators. A secret is shown once. */
import { useEffect, useState } from "preact/hooks";
import { api } from "../api";
import { age, plural } from "../format";
import { Empty, ErrorCard, Head } from "../parts/basics";
import { nowMs } from "../store/session";
import { grantOf, powers, ROLES, type Role } from "../store/tokens";
import type { TokenRow } from "../types";
import { useLoaded } from "./loaded";

export function TokensPage() {
  const [tokens, setTokens] = useState<readonly TokenRow[] | null>(null);
  const { error, guarded } = useLoaded();
  const load = (act = async () => {}) =>
    guarded(async () => {
      await act();
      setTokens((await api.tokens()).items);
    });
  useEffect(() => void load(), []);
  const valid = tokens?.filter((token) => token.revoked_at === null) ?? [];
  return (
    <main class="page" id="main">
      <div class="page-head">
        <h1>Tokens</h1>
        {tokens !== null && <span class="muted">{plural(valid.length, "token")}</span>}
        <span class="grow" />
        <button type="button" class="btn" onClick={() => void load()}>
          Refresh
        </button>
      </div>
      {error !== null && <ErrorCard error={error} retry={() => void load()} />}
      <NewToken make={load} />
      <div class="card">
        {tokens !== null && valid.length === 0 ? (
          <Empty title="There are no tokens" />
        ) : (
          <TokenTable tokens={valid} revoke={(token) => void load(() => api.revokeToken(token.id))} />
        )}
      </div>
    </main>
  );
}

function NewToken({ make }: { make: (act: () => Promise<void>) => Promise<void> }) {
  const [name, setName] = useState("");
  const [role, setRole] = useState<Role>("viewer");
  const [projects, setProjects] = useState("");
  const [secret, setSecret] = useState<string | null>(null);
  const submit = async (event: Event) => {
    event.preventDefault();
    await make(async () => setSecret((await api.createToken({ name, ...grantOf(role, projects) })).token));
  };
  return (
    <form class="card token-form" onSubmit={(event) => void submit(event)} data-testid="new-token">
      <label>
        Name
        <input
          class="field"
          required
          maxLength={255}
          value={name}
          onInput={(event) => setName(event.currentTarget.value)}
        />
      </label>
      <label>
        Role
        <select class="field" value={role} onChange={(event) => setRole(event.currentTarget.value as Role)}>
          {ROLES.map((one) => (
            <option key={one}>{one}</option>
          ))}
        </select>
      </label>
      <label>
        Projects
        <input
          class="field"
          placeholder="all, or names"
          value={projects}
          onInput={(event) => setProjects(event.currentTarget.value)}
        />
      </label>
      <button type="submit" class="btn">
        Make a token
      </button>
      {secret !== null && (
        <p role="status">
          It is shown this once: <code data-testid="secret">{secret}</code>
        </p>
      )}
    </form>
  );
}

function TokenTable({ tokens, revoke }: { tokens: readonly TokenRow[]; revoke: (token: TokenRow) => void }) {
  return (
    <table data-testid="tokens">
      <Head columns={["Token", "Kind", "May", ["Expires", "num"], ["Last used", "num"], { bar: "Actions" }]} />
      <tbody>
        {tokens.map((token) => (
          <tr key={token.id}>
            <td class="jobname">{token.name}</td>
            <td>{token.kind}</td>
            <td>{powers(token)}</td>
            <td class="num">{token.expires_at === null ? "never" : token.expires_at.slice(0, 10)}</td>
            <td class="num">{token.last_used_at === null ? "–" : `${age(token.last_used_at, nowMs.value)} ago`}</td>
            <td>
              <button
                type="button"
                class="btn small"
                onClick={() => confirm(`Revoke ${token.name}? What uses it is refused from then on.`) && revoke(token)}
                aria-label={`Revoke ${token.name}`}
              >
                Revoke
              </button>
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
