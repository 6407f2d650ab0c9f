/** "Record 5 s in full": for a while the job's processes send every step whole, and not a sample of them. */
import { useSignal } from "@preact/signals";
import { useEffect } from "preact/hooks";
import { ApiError, api } from "../api";
import { plural } from "../format";
import { ErrorCard } from "../parts/basics";
import type { JobStore } from "../store/job";
import { isPassing } from "../store/refusals";
import type { FullRecording } from "../types";

export const RECORD_S = 5;

export function Record({ store }: { store: JobStore }) {
  const asking = useSignal(false);
  const asked = useSignal<FullRecording | null>(null);
  const isOver = useSignal(false);
  const before = useSignal(0);
  const failure = useSignal<ApiError | null>(null);
  const job = store.job.value;
  const recording = asked.value;
  useEffect(() => {
    if (recording === null) return;
    isOver.value = false;
    const timer = setTimeout(() => {
      isOver.value = true;
    }, recording.seconds * 1000);
    return () => clearTimeout(timer);
  }, [recording, isOver]);
  store.stepVersion.value;
  if (job === null || job.kind !== "managed" || (job.state !== "RUNNING" && recording === null)) return null;
  const isBusy = asking.value || (recording !== null && !isOver.value) || job.state !== "RUNNING";
  const take = async () => {
    if (isBusy) return;
    asking.value = true;
    before.value = store.history.inFull();
    try {
      asked.value = await api.record(job.id, RECORD_S);
      failure.value = null;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      failure.value = error;
    } finally {
      asking.value = false;
    }
  };
  return (
    <>
      <button
        type="button"
        class="btn small"
        aria-disabled={isBusy}
        title={`Every step of the next ${RECORD_S} s, not a sample of them. It costs the job some processor time.`}
        onClick={() => void take()}
        data-testid="record"
      >
        {recording !== null && !isOver.value ? "Recording…" : `Record ${RECORD_S} s in full`}
      </button>
      {recording !== null && (
        <span class="muted" role="status" data-testid="recorded">
          {said(recording, isOver.value, Math.max(0, store.history.inFull() - before.value))}
        </span>
      )}
      {failure.value !== null && (
        <ErrorCard error={failure.value} {...(isPassing(failure.value) ? { retry: () => void take() } : {})} />
      )}
    </>
  );
}

function said(recording: FullRecording, isOver: boolean, steps: number): string {
  const without = recording.processes.filter((one) => one.error !== "");
  const not = without.map((one) => ` · not ${one.role} ${one.index}: ${one.error}`).join("");
  return isOver
    ? `recorded in full; ${plural(steps, "step")} of it ${steps === 1 ? "is" : "are"} here${not}`
    : `every step for ${recording.seconds} s${not}`;
}
