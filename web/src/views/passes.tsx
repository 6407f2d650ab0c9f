/** The graph before and after each pass: the row of passes, what one of them did, and its operators as a table. */
import { untracked, useSignalEffect } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";
import { integer, plural, shortType } from "../format";
import type { GraphController } from "../graph/controller";
import { bucketOf } from "../graph/group";
import {
  MARKS,
  markOf,
  numberOf,
  type PassFacts,
  passesOf,
  type Stage,
  stageOf,
  type TypeCount,
} from "../graph/stages";
import { SIGN } from "../graph/tints";
import { Head } from "../parts/basics";
import { setQuery, url } from "../router";
import type { JobStore } from "../store/job";
import type { GraphOp } from "../types";

const MAX_ROWS = 500;
const MOST_TYPES = 8;
const SIDES = ["before", "after"] as const;
type Side = (typeof SIDES)[number];

/** Which pass the address names, from 0, and which side of it. */
function wanted(): { readonly pass: number; readonly side: Side } | null {
  const pass = url.value.searchParams.get("pass");
  if (pass === null || !/^\d{1,3}$/.test(pass)) return null;
  return { pass: Number(pass) - 1, side: url.value.searchParams.get("side") === "after" ? "after" : "before" };
}

/** Show the stage that the address names, as long as the graph is on the page. */
export function useStage(store: JobStore): void {
  useSignalEffect(() => {
    const [document, at] = [store.shownDocument.value, wanted()];
    const stage = document === null || at === null ? null : stageOf(document, at.pass, at.side);
    untracked(() => {
      store.stage.value = stage;
    });
  });
  useEffect(
    () => () => {
      store.stage.value = null;
    },
    [store],
  );
}

const shownPasses = (store: JobStore): readonly PassFacts[] => {
  const document = store.shownDocument.value;
  return document === null ? [] : passesOf(document);
};

export function PassesButton({ store }: { store: JobStore }) {
  const on = store.stage.value !== null;
  if ((store.shownDocument.value?.passes?.ran.length ?? 0) === 0) return null; // without replaying them
  return (
    <button
      type="button"
      class="btn small"
      aria-pressed={on}
      onClick={() => setQuery(on ? { pass: null, side: null } : { pass: "1", op: null })}
      data-testid="passes"
    >
      Passes
    </button>
  );
}

export function PassStrip({ store }: { store: JobStore }) {
  const at = wanted();
  if (store.stage.value === null || at === null) return null;
  const passes = shownPasses(store);
  return (
    <div class="passes" role="group" aria-label="Graph passes" data-testid="pass-strip">
      <div class="row">
        <span class="faint">built: {integer(passes[0]?.before ?? 0)}</span>
        {passes.map((pass, index) => (
          <button
            type="button"
            key={pass.name}
            class="btn small"
            aria-pressed={index === at.pass}
            onClick={() => setQuery({ pass: String(index + 1) })}
          >
            {pass.title} <Numbers facts={pass} />
          </button>
        ))}
        <span class="faint">runs: {integer(passes[passes.length - 1]?.after ?? 0)}</span>
      </div>
      <div class="row sides">
        {SIDES.map((side) => (
          <button
            type="button"
            key={side}
            class="btn small"
            aria-pressed={side === at.side}
            onClick={() => setQuery({ side: side === "after" ? side : null })}
            data-testid={`pass-${side}`}
          >
            {side}
          </button>
        ))}
      </div>
    </div>
  );
}

/** "−142 +2 ~6", each in its colour; edges alone where nothing else changed. */
function Numbers({ facts }: { facts: PassFacts }) {
  const numbers = numberOf(facts);
  const shown = (["removed", "added", "changed"] as const).filter((mark) => numbers[mark] > 0);
  if (shown.length === 0) return <span class="mono faint">edges</span>;
  return (
    <span class="mono">
      {shown.map((mark) => (
        <span key={mark} class={`mark ${mark}`}>
          {` ${SIGN[mark]}${integer(numbers[mark])}`}
        </span>
      ))}
    </span>
  );
}

/** In the side panel: what the pass did, and the box that is selected or under the pointer. */
export function PassPanel({ store, graph, stage }: { store: JobStore; graph: GraphController; stage: Stage }) {
  const at = wanted();
  const facts = shownPasses(store)[at?.pass ?? -1];
  if (at === null || facts === undefined) return null;
  const unchanged = store.shownDocument.value?.passes?.unchanged ?? [];
  const index = graph.hovered.value >= 0 && graph.selected < 0 ? graph.hovered.value : graph.selected;
  const box = graph.layout?.boxes[index];
  return (
    <>
      <div data-testid="pass-panel">
        <h2>
          <span>{facts.title}</span>
        </h2>
        <p class="muted">
          <span class="mono">{facts.name}</span>: {integer(facts.before)} → {plural(facts.after, "operator")}; edges −
          {integer(facts.edgesRemoved)} +{integer(facts.edgesAdded)}
        </p>
        <table>
          <tbody>
            <Types mark="removed" counts={facts.removed} />
            <Types mark="added" counts={facts.added} />
            <Types mark="changed" counts={facts.changed} />
          </tbody>
        </table>
        {unchanged.length > 0 && <p class="faint">Ran and changed nothing: {unchanged.join(" · ")}.</p>}
      </div>
      {box !== undefined && (
        <Marked label={box.op?.name ?? box.group.label} ops={box.op?.ops ?? box.group.ops} stage={stage} />
      )}
    </>
  );
}

function Types({ mark, counts }: { mark: "removed" | "added" | "changed"; counts: readonly TypeCount[] }) {
  const shown = counts.slice(0, MOST_TYPES);
  const rest = counts.slice(MOST_TYPES).reduce((sum, one) => sum + one.count, 0);
  return (
    <>
      {shown.map(({ type, count }) => (
        <tr key={type}>
          <td class={`mark ${mark}`}>
            {SIGN[mark]} {mark}
          </td>
          <td class="mono">{type}</td>
          <td class="num">{integer(count)}</td>
        </tr>
      ))}
      {rest > 0 && (
        <tr>
          <td class={`mark ${mark}`}>
            {SIGN[mark]} {mark}
          </td>
          <td class="faint">other types</td>
          <td class="num">{integer(rest)}</td>
        </tr>
      )}
    </>
  );
}

function Marked({ label, ops, stage }: { label: string; ops: readonly number[]; stage: Stage }) {
  const first = stage.document.ops[ops[0] ?? -1];
  if (first === undefined) return null;
  const { mark, part } = markOf(stage.marks, ops);
  const touched = Math.round(part * ops.length);
  return (
    <div data-testid="stage-box">
      <h2>
        <span>
          <i class={`swatch c-${bucketOf(first)}`} />
          {label}
        </span>
        <span class={`mark ${mark}`}>
          {touched === 0 ? "" : `${SIGN[mark]}${integer(touched)} of ${integer(ops.length)}`}
        </span>
      </h2>
      <dl>
        <dt>{ops.length === 1 ? "type" : "first"}</dt>
        <dd>{first.type}</dd>
        <dt>module</dt>
        <dd>{first.module || "–"}</dd>
        <dt>line</dt>
        <dd>{first.source || "–"}</dd>
      </dl>
    </div>
  );
}

interface Row {
  readonly op: GraphOp;
  readonly index: number;
  readonly mark: (typeof MARKS)[number];
}

/** Every operator of a stage; first those that the pass touches. */
export function StageTable({ stage }: { stage: Stage }) {
  const [text, setText] = useState("");
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = stage.document.ops
    .map((op, index): Row => ({ op, index, mark: MARKS[stage.marks[index] ?? 0] ?? "same" }))
    .filter(({ op, mark }) => {
      const all = `${mark} ${op.name} ${op.type} ${op.module} ${bucketOf(op)}`.toLowerCase();
      return words.every((word) => all.includes(word));
    })
    .sort((a, b) => Number(b.mark !== "same") - Number(a.mark !== "same") || a.index - b.index);
  return (
    <div class="scroll" tabIndex={0} role="region" aria-label="Operators" data-testid="stage-table">
      <div style={{ padding: "4px 14px 8px", maxWidth: "340px" }}>
        <input
          class="field"
          placeholder="Filter by name, type, module, role or change"
          aria-label="Filter operators"
          value={text}
          onInput={(event) => setText(event.currentTarget.value)}
        />
      </div>
      <table>
        <Head
          columns={[
            "Operator",
            "Change",
            "Type",
            ["Role", "tiny-hide"],
            ["Module", "tiny-hide"],
            ["Replica", "tiny-hide"],
          ]}
        />
        <tbody>
          {rows.slice(0, MAX_ROWS).map(({ op, index, mark }) => (
            <tr key={index}>
              <td>{op.name}</td>
              <td class={`mark ${mark}`}>{mark === "same" ? "–" : `${SIGN[mark]} ${mark}`}</td>
              <td class="mono">{shortType(op.type)}</td>
              <td class="tiny-hide">
                <i class={`swatch c-${bucketOf(op)}`} />
                {bucketOf(op)}
              </td>
              <td class="tiny-hide">{op.module || "–"}</td>
              <td class="tiny-hide">{op.replica < 0 ? "all" : op.replica}</td>
            </tr>
          ))}
        </tbody>
      </table>
      {rows.length > MAX_ROWS && (
        <p class="muted" style={{ padding: "8px 14px" }}>
          {integer(rows.length - MAX_ROWS)} more; filter to see them.
        </p>
      )}
    </div>
  );
}
