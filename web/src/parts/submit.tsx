/** A button that submits a job's specification anew, with other variables if some are given, and goes to the new job. */
import { useState } from "preact/hooks";
import { ApiError, api } from "../api";
import { jobHref, navigate } from "../router";
import { hiddenVariables } from "../store/crash";
import type { Job } from "../types";
import { ErrorCard } from "./basics";

interface Submission {
  readonly job: Job;
  readonly label: string;
  /** What a screen reader hears behind the label, where several buttons have the same one. */
  readonly about?: string;
  readonly env?: Readonly<Record<string, string>>;
  readonly testId: string;
}

export function Submit({ job, label, about, env, testId }: Submission) {
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(false);
  const hidden = hiddenVariables(job);
  const submit = async () => {
    setBusy(true);
    try {
      const spec = env === undefined ? job.spec : { ...job.spec, env: { ...job.spec.env, ...env } };
      navigate(jobHref((await api.submit(spec)).id));
    } catch (failure) {
      if (!(failure instanceof ApiError)) throw failure;
      setError(failure);
      setBusy(false);
    }
  };
  if (hidden.length > 0) {
    return <span class="muted">Run it again from a terminal: the value of {hidden.join(", ")} is not shown here.</span>;
  }
  return (
    <>
      <button
        type="button"
        class="btn small"
        disabled={busy}
        onClick={() => void submit()}
        data-testid={testId}
        aria-label={about === undefined ? label : `${label}: ${about}`}
      >
        {label}
      </button>
      {error !== null && <ErrorCard error={error} />}
    </>
  );
}
