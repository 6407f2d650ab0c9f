/**
 * Log in with a one-time code. `/login#code=…` does it without a click, `&job=…` opens that job's page; the code never
 * stays in the address.
 */
import { useEffect, useState } from "preact/hooks";
import { ApiError, api } from "../api";
import { ErrorCard } from "../parts/basics";
import { jobHref, navigate, route } from "../router";
import { askSession } from "../store/session";

function fieldsInHash(): { code: string | null; job: string | null } {
  const fields = new URLSearchParams(location.hash.slice(1));
  return { code: fields.get("code"), job: fields.get("job") };
}

export function LoginPage() {
  const [code, setCode] = useState("");
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(false);
  const submit = async (value: string, job: string | null) => {
    setBusy(true);
    setError(null);
    try {
      await api.login(value.trim());
      // First: a page that is still /login when the session is known becomes the list of jobs.
      if (route.value.page === "login") navigate(job === null ? "/" : jobHref(job), "replace");
      await askSession();
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      setError(failure);
      setBusy(false);
    }
  };
  useEffect(() => {
    const take = () => {
      const { code: given, job } = fieldsInHash();
      if (given === null) return;
      history.replaceState(null, "", "/login");
      void submit(given, job);
    };
    take();
    // A link with a code that is opened where this page is already open changes the hash and loads nothing.
    addEventListener("hashchange", take);
    return () => removeEventListener("hashchange", take);
  }, []);
  return (
    <main class="login" id="main">
      <form
        onSubmit={(event) => {
          event.preventDefault();
          void submit(code, null);
        }}
        data-testid="login"
      >
        <h1>Log in to Penstock</h1>
        <p class="muted">
          Open the link that <code class="mono">penstock up</code> or <code class="mono">penstock demo</code> printed,
          or paste its code. A code works once, for five minutes.
        </p>
        {error !== null && <ErrorCard error={error} />}
        <label>
          <span class="sr">One-time code</span>
          <input
            class="field mono"
            placeholder="One-time code"
            autocomplete="one-time-code"
            value={code}
            onInput={(event) => setCode(event.currentTarget.value)}
          />
        </label>
        <button type="submit" class="btn primary" disabled={busy || code.trim() === ""}>
          {busy ? "Logging in…" : "Log in"}
        </button>
      </form>
    </main>
  );
}
