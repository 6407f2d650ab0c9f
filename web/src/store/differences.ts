/** Settings in which jobs differ, and what of them could not be compared. Pure. */
import { integer } from "../format";
import type { Job } from "../types";
import { MASK } from "./masking";

/** A setting and its values. */
export interface Difference {
  /** As in the job's file: "trainers.count", "env.CPU_NUM". */
  readonly setting: string;
  /** By job, in their order; null where a job has no such setting. */
  readonly values: readonly (string | null)[];
}

export interface Comparison {
  readonly found: readonly Difference[];
  /** Settings of at least two jobs that the server hides of one or more: the values may be the same or not. */
  readonly hidden: readonly string[];
}

/** The specifications of jobs, in the order of the first one's settings. Their names are no setting. */
export function comparison(jobs: readonly Job[]): Comparison {
  const all = valuesOf(jobs);
  return {
    found: all.filter(differs),
    hidden: all
      .filter((one) => one.values.some((value) => isHidden(one, value)))
      .filter(({ values }) => values.filter((value) => value !== null).length > 1)
      .map(({ setting }) => setting),
  };
}

/** Of values that are hidden, only whether a job has one at all counts. */
function differs(one: Difference): boolean {
  const shown = one.values.filter((value) => !isHidden(one, value));
  return new Set(shown).size > 1 || (shown.includes(null) && shown.length < one.values.length);
}

const isHidden = ({ setting }: Difference, value: string | null): boolean =>
  value === MASK && setting.startsWith("env.");

const MOST_NAMED = 8;

/** Sentences about what the table does not say: that nothing differs, and what was left out. */
export function remarks(compared: number, { found, hidden }: Comparison, missing: readonly string[]): string[] {
  const same = missing.length > 0 ? "The loaded jobs have the same settings." : "The jobs have the same settings.";
  const isSame = compared > 1 && found.length === 0;
  return [
    ...(isSame ? [hidden.length > 0 ? "No difference in the settings whose values are shown." : same] : []),
    ...(hidden.length > 0 ? [`Hidden values are not compared: ${listed(hidden)}.`] : []),
    ...(missing.length > 0 ? [`Settings are not compared of jobs outside the loaded list: ${listed(missing)}.`] : []),
  ];
}

function listed(names: readonly string[]): string {
  const more = names.length - MOST_NAMED;
  return names.slice(0, MOST_NAMED).join(", ") + (more > 0 ? ` and ${integer(more)} more` : "");
}

function valuesOf(jobs: readonly Job[]): Difference[] {
  const flat = jobs.map((job) => new Map(settingsOf(job.spec, "")));
  const names = new Set(flat.flatMap((settings) => [...settings.keys()]));
  names.delete("name");
  return [...names].map((setting) => ({ setting, values: flat.map((settings) => settings.get(setting) ?? null) }));
}

/** Lists are one setting each: an entrypoint is read as a whole. */
function settingsOf(value: unknown, path: string): [string, string][] {
  if (value === null || value === undefined) return [];
  if (typeof value !== "object") return [[path, String(value)]];
  if (Array.isArray(value))
    return [[path, value.every((one) => typeof one !== "object") ? value.join(" ") : JSON.stringify(value)]];
  return Object.entries(value).flatMap(([name, inner]) => settingsOf(inner, path === "" ? name : `${path}.${name}`));
}
