/** Replicas (trainers and parameter servers): their names, where they run, how they ended. */

import { age } from "../format";
import { Head, Link, StateChip } from "../parts/basics";
import { jobHref } from "../router";
import { nowMs } from "../store/session";
import type { Job, NodeRow, Replica } from "../types";

interface Props {
  readonly replicas: readonly Replica[];
  /** The job of each replica; shown as a first column when given. */
  readonly jobs?: readonly Job[];
  readonly nodes?: readonly NodeRow[];
}

export function ReplicaTable({ replicas, jobs, nodes }: Props) {
  return (
    <table data-testid="replicas">
      <Head
        columns={[
          ...(jobs !== undefined ? ["Job"] : []),
          "Role",
          "State",
          ["Host", "tiny-hide"],
          ["Process", "num tiny-hide"],
          ["Endpoint", "tiny-hide"],
          ["Up", "num"],
        ]}
      />
      <tbody>
        {replicas.map((one, index) => (
          <tr key={one.id} data-testid="replica-row" data-role={one.role}>
            {jobs !== undefined && (
              <td>
                <Link href={jobHref(one.job_id)}>{jobs[index]?.name ?? one.job_id}</Link>
              </td>
            )}
            <td class="mono">
              {one.role}-{one.index}
            </td>
            <td>
              <StateChip state={one.state} />
              {ending(one) !== "" && <span class="tag">{ending(one)}</span>}
              {isReplaced(one, replicas) && <span class="tag">replaced</span>}
            </td>
            <td class="tiny-hide">{hostOf(one, nodes)}</td>
            <td class="num tiny-hide">{one.pid ?? "–"}</td>
            <td class="mono tiny-hide">{one.endpoint ?? "–"}</td>
            <td class="num">{one.finished_at === null ? age(one.started_at, nowMs.value) : "ended"}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function hostOf(one: Replica, nodes: readonly NodeRow[] | undefined): string {
  const node = nodes?.find((candidate) => candidate.id === one.node_id);
  return node?.name ?? one.host ?? "–";
}

/** Another process of the same attempt stands in its place. */
function isReplaced(one: Replica, among: readonly Replica[]): boolean {
  const same = (other: Replica) =>
    other.job_id === one.job_id &&
    other.attempt === one.attempt &&
    other.role === one.role &&
    other.index === one.index;
  return among.some((other) => same(other) && other.stream > one.stream);
}

function ending(one: Replica): string {
  if (one.signal !== null) return `signal ${one.signal}`;
  return one.exit_code === null ? "" : `exit ${one.exit_code}`;
}

/** The short list in the side panel of a job. */
export function ReplicaList({ replicas }: { replicas: readonly Replica[] }) {
  return (
    <table data-testid="replica-list">
      <tbody>
        {replicas.map((one) => (
          <tr key={one.id} data-testid="replica-row" data-role={one.role}>
            <td class="mono">
              {one.role}-{one.index}
              {isReplaced(one, replicas) && <span class="tag">replaced</span>}
            </td>
            <td
              class="muted clip"
              style={{ maxWidth: "120px" }}
              title={`${one.endpoint ?? ""} host ${one.host ?? "–"}, process ${one.pid ?? "–"}`.trim()}
            >
              {one.endpoint ?? `${one.host ?? "–"} · ${one.pid ?? "–"}`}
            </td>
            <td class="right">
              <StateChip state={one.state} />
            </td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}
