/** Where the Python threads of a running process are, which the agent of its node reads without stopping it. */
import { useSignal } from "@preact/signals";
import { useLayoutEffect, useRef } from "preact/hooks";
import { ApiError, api } from "../api";
import { clock, plural } from "../format";
import { ErrorCard } from "../parts/basics";
import { navigate, url } from "../router";
import { newestOf } from "../store/exchange";
import { isPassing } from "../store/refusals";
import type { Job, PythonProcess, PythonStacks, PythonThread } from "../types";

/** The part of an address that leads here. */
export const STACKS = "stacks";
/** Bring into view, with the focus on its button, what the address leads to; once, so that a link leads here again. */
function useArrival() {
  const button = useRef<HTMLButtonElement>(null);
  const { hash, pathname, search } = url.value;
  useLayoutEffect(() => {
    if (hash !== `#${STACKS}` || button.current === null) return;
    button.current.closest("section")?.scrollIntoView({ block: "start" });
    button.current.focus({ preventScroll: true });
    navigate(pathname + search, "replace");
  }, [hash, pathname, search]);
  return button;
}

export function Stacks({ job }: { job: Job }) {
  const running = newestOf(job.replicas).filter((one) => one.state === "RUNNING" && one.node_id !== null);
  const chosen = useSignal<string | null>(null);
  const taken = useSignal<PythonStacks | null>(null);
  const failure = useSignal<ApiError | null>(null);
  const isBusy = useSignal(false);
  const wanted = useSignal(0);
  const button = useArrival();
  const replica = running.find((one) => one.id === chosen.value) ?? running[0];
  if (replica === undefined && taken.value === null && failure.value === null) return null;
  const take = async (skip = 0) => {
    if (replica === undefined || isBusy.value) return;
    isBusy.value = true;
    wanted.value = skip;
    try {
      taken.value = await api.stacks(job.id, replica.id, skip);
      failure.value = null;
    } catch (error) {
      if (!(error instanceof ApiError)) throw error;
      failure.value = error;
    } finally {
      isBusy.value = false;
    }
  };
  return (
    <section class="stacks" aria-labelledby="stacks-title" data-testid="stacks">
      <h3 id="stacks-title">Python stacks</h3>
      <p class="stacks-tools">
        <select
          aria-label="Process"
          value={replica?.id ?? ""}
          onChange={(event) => {
            chosen.value = event.currentTarget.value;
          }}
        >
          {running.map((one) => (
            <option key={one.id} value={one.id}>
              {one.role} {one.index}
            </option>
          ))}
        </select>
        <button
          ref={button}
          type="button"
          class="btn small"
          aria-disabled={isBusy.value || replica === undefined}
          onClick={() => void take()}
          data-testid="take-stacks"
        >
          {isBusy.value ? "Reading…" : "Show where it is"}
        </button>
        <span class="muted">It is not stopped.</span>
      </p>
      {failure.value !== null && (
        <ErrorCard
          error={failure.value}
          {...(isPassing(failure.value) ? { retry: () => void take(wanted.value) } : {})}
        />
      )}
      {taken.value !== null && <Taken taken={taken.value} />}
      {taken.value !== null && taken.value.replica_id === replica?.id && (
        <More taken={taken.value} isBusy={isBusy.value} take={take} />
      )}
    </section>
  );
}

interface MoreProps {
  readonly taken: PythonStacks;
  readonly isBusy: boolean;
  readonly take: (skip: number) => Promise<void>;
}

/** The processes before and behind those that are shown: an agent takes some of them at once. */
function More({ taken, isBusy, take }: MoreProps) {
  const next = taken.skip + taken.processes.length;
  if (taken.skip === 0 && taken.num_left === 0) return null;
  return (
    <p class="stacks-tools">
      {taken.num_left > 0 && (
        <button
          type="button"
          class="btn small"
          aria-disabled={isBusy}
          onClick={() => void take(next)}
          data-testid="more-stacks"
        >
          Show the next of {plural(taken.num_left, "other process", "other processes")}
        </button>
      )}
      {taken.skip > 0 && (
        <button type="button" class="btn small" aria-disabled={isBusy} onClick={() => void take(0)}>
          Show the first again
        </button>
      )}
    </p>
  );
}

function Taken({ taken }: { taken: PythonStacks }) {
  return (
    <div role="status" data-testid="stacks-taken">
      <p class="muted">
        {taken.role} {taken.index} at {clock(taken.taken_at)}, the innermost call first
      </p>
      {taken.processes.map((process) => (
        <Process key={process.pid} process={process} />
      ))}
    </div>
  );
}

function Process({ process }: { process: PythonProcess }) {
  return (
    <div class="stack-process">
      <p class="mono">
        process {process.pid}: {process.command}
      </p>
      {process.error !== "" && <p class="stack-error">{process.error}</p>}
      {process.threads.map((thread, index) => (
        <Thread key={thread.os_thread_id ?? index} thread={thread} />
      ))}
    </div>
  );
}

function Thread({ thread }: { thread: PythonThread }) {
  const at = thread.frames.findIndex((frame) => frame.own);
  return (
    <div class="stack-thread">
      <b>{thread.name || `thread ${thread.os_thread_id ?? ""}`}</b>
      {thread.active && <span class="tag">active</span>}
      {thread.owns_gil && <span class="tag">holds the GIL</span>}
      <ol>
        {thread.frames.map((frame, index) => (
          <li key={index} class={frame.own ? "stack-own" : "muted"} title={frame.file}>
            <code>
              {frame.name} {frame.file.split("/").slice(-2).join("/")}:{frame.line}
            </code>
            {index === at && <mark>your line</mark>}
          </li>
        ))}
      </ol>
    </div>
  );
}
