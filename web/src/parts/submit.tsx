/** A button that submits a job's specification anew, with other variables or sizes if given, and goes to the new job. */
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
  /** How many servers and trainers. */
  readonly sizes?: { readonly pservers: number; readonly trainers: number };
  readonly testId: string;
}

/** The specification with other variables and numbers; what each replica needs stays. */
function changed({ job, env, sizes }: Submission): Job["spec"] {
  const spec = env === undefined ? job.spec : { ...job.spec, env: { ...job.spec.env, ...env } };
  if (sizes === undefined || spec.pservers === undefined || spec.trainers === undefined) return spec;
  return {
    ...spec,
    pservers: { ...spec.pservers, count: sizes.pservers },
    trainers: { ...spec.trainers, count: sizes.trainers },
  };
}

export function Submit(submission: Submission) {
  const { job, label, about, testId } = submission;
  const [error, setError] = useState<ApiError | null>(null);
  const [busy, setBusy] = useState(false);
  const hidden = hiddenVariables(job);
  const submit = async () => {
    setBusy(true);
    try {
      navigate(jobHref((await api.submit(changed(submission))).id));
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
