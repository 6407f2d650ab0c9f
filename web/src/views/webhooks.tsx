/** Webhooks: where changes of jobs' states are posted to; created, tested, enabled and removed by administrators. */
import { useEffect, useState } from "preact/hooks";
import { api } from "../api";
import { plural } from "../format";
import { Empty, ErrorCard, Head } from "../parts/basics";
import { standing } from "../store/webhooks";
import type { WebhookRow } from "../types";
import { useLoaded } from "./loaded";

type Guarded = (act: () => Promise<unknown>) => Promise<void>;

export function WebhooksPage() {
  const [hooks, setHooks] = useState<readonly WebhookRow[] | null>(null);
  const loaded = useLoaded();
  const { error } = loaded;
  const guarded: Guarded = (act) =>
    loaded.guarded(async () => {
      await act();
      setHooks((await api.webhooks()).items);
    });
  const load = () => guarded(async () => {});
  useEffect(() => void load(), []);
  return (
    <main class="page" id="main">
      <div class="page-head">
        <h1>Webhooks</h1>
        {hooks !== null && <span class="muted">{plural(hooks.length, "webhook")}</span>}
        <span class="grow" />
        <button type="button" class="btn" onClick={() => void load()}>
          Refresh
        </button>
      </div>
      {error !== null && <ErrorCard error={error} retry={() => void load()} />}
      <NewWebhook make={guarded} />
      <div class="card">
        {hooks?.length === 0 ? (
          <Empty title="There are no webhooks" />
        ) : (
          <WebhookTable hooks={hooks ?? []} guarded={guarded} />
        )}
      </div>
    </main>
  );
}

function NewWebhook({ make }: { make: Guarded }) {
  const [to, setTo] = useState("");
  const [project, setProject] = useState("");
  const [secret, setSecret] = useState<string | null>(null);
  const submit = async (event: Event) => {
    event.preventDefault();
    const only = project.trim();
    await make(async () => setSecret((await api.createWebhook(to, only === "" ? null : only)).secret));
  };
  return (
    <form class="card token-form" onSubmit={(event) => void submit(event)} data-testid="new-webhook">
      <label>
        URL
        <input
          class="field"
          type="url"
          required
          placeholder="https://hooks.example.org/penstock"
          value={to}
          onInput={(event) => setTo(event.currentTarget.value)}
        />
      </label>
      <label>
        Project
        <input
          class="field"
          placeholder="all"
          value={project}
          onInput={(event) => setProject(event.currentTarget.value)}
        />
      </label>
      <button type="submit" class="btn">
        Add a webhook
      </button>
      {secret !== null && (
        <p role="status">
          Its secret is shown this once: <code data-testid="secret">{secret}</code>
        </p>
      )}
    </form>
  );
}

function WebhookTable({ hooks, guarded }: { hooks: readonly WebhookRow[]; guarded: Guarded }) {
  return (
    <table data-testid="webhooks">
      <Head columns={["URL", "Project", "Events", "State", { bar: "Actions" }]} />
      <tbody>
        {hooks.map((hook) => (
          <tr key={hook.id}>
            <td class="jobname">{hook.url}</td>
            <td>{hook.project ?? "all"}</td>
            <td>{hook.events.join(", ")}</td>
            <td>{standing(hook)}</td>
            <td>
              <Actions hook={hook} guarded={guarded} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Actions({ hook, guarded }: { hook: WebhookRow; guarded: Guarded }) {
  const remove = () =>
    confirm(`Remove ${hook.url}? Its pending deliveries are lost.`) && void guarded(() => api.removeWebhook(hook.id));
  return (
    <>
      {hook.disabled_at === null ? (
        <button type="button" class="btn small" onClick={() => void guarded(() => api.testWebhook(hook.id))}>
          Test
        </button>
      ) : (
        <button type="button" class="btn small" onClick={() => void guarded(() => api.enableWebhook(hook.id))}>
          Enable
        </button>
      )}
      <button type="button" class="btn small" onClick={remove}>
        Remove
      </button>
    </>
  );
}
