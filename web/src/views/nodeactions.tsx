/** What an administrator does with a node: cordon it, drain it, use it again. */
import { useState } from "preact/hooks";
import { api } from "../api";
import { plural } from "../format";
import { Dialog } from "../parts/basics";
import type { NodeRow } from "../types";

export type Changed = (act: () => Promise<void>) => Promise<void>;

const TAKES_NOTHING = new Set(["CORDONED", "DRAINING", "DRAINED"]);

export function NodeActions({ node, changed }: { node: NodeRow; changed: Changed }) {
  const [asking, setAsking] = useState(false);
  const want = (what: "cordon" | "uncordon") => void changed(async () => void (await api.wantNode(node.id, what)));
  return (
    <div class="row-actions">
      {TAKES_NOTHING.has(node.state) ? (
        <Action label="Uncordon" node={node} act={() => want("uncordon")} />
      ) : (
        <Action label="Cordon" node={node} act={() => want("cordon")} />
      )}
      {node.state !== "DRAINED" && <Action label="Drain…" node={node} act={() => setAsking(true)} />}
      {asking && (
        <DrainDialog
          node={node}
          close={() => setAsking(false)}
          drain={(deadlineS) => {
            setAsking(false);
            void changed(async () => void (await api.drainNode(node.id, deadlineS)));
          }}
        />
      )}
    </div>
  );
}

function Action({ label, node, act }: { label: string; node: NodeRow; act: () => void }) {
  return (
    <button type="button" class="btn small" aria-label={`${label} ${node.name}`} onClick={act}>
      {label}
    </button>
  );
}

interface Drain {
  readonly node: NodeRow;
  readonly close: () => void;
  readonly drain: (deadlineS: number | null) => void;
}

/** Asks for the deadline, and so for a confirmation: jobs that run there may be preempted. */
function DrainDialog({ node, close, drain }: Drain) {
  const [minutes, setMinutes] = useState("");
  const submit = (event: Event) => {
    event.preventDefault();
    drain(minutes === "" ? null : Number(minutes) * 60);
  };
  const runs = `${plural(node.replicas, "replica")} ${node.replicas === 1 ? "runs" : "run"} there now.`;
  return (
    <Dialog label={`Drain ${node.name}`} onClose={close}>
      <h2>Drain {node.name}?</h2>
      <form onSubmit={submit} data-testid="drain">
        <p>Nothing more is placed there. {runs}</p>
        <label>
          Preempt what still runs after so many minutes (empty: wait for it)
          <input
            class="field"
            type="number"
            min="0"
            max="500000"
            step="any"
            placeholder="wait"
            value={minutes}
            onInput={(event) => setMinutes(event.currentTarget.value)}
          />
        </label>
        <p class="muted">A preempted job loses no restart. It is placed again on another node.</p>
        <div class="dialog-actions">
          <button type="button" class="btn" onClick={close}>
            Cancel
          </button>
          <button type="submit" class="btn">
            Drain
          </button>
        </div>
      </form>
    </Dialog>
  );
}
