/** Settings in which jobs differ. Pure. */
import type { Job } from "../types";

export interface Difference {
  /** As in the job's file: "trainers.count", "env.CPU_NUM". */
  readonly setting: string;
  /** By job, in their order; null where a job has no such setting. */
  readonly values: readonly (string | null)[];
}

/** What differs between the specifications of jobs, in the order of the first one's settings. Their names are no setting. */
export function differences(jobs: readonly Job[]): Difference[] {
  const flat = jobs.map((job) => new Map(settingsOf(job.spec, "")));
  const names = new Set(flat.flatMap((settings) => [...settings.keys()]));
  names.delete("name");
  return [...names].flatMap((setting) => {
    const values = flat.map((settings) => settings.get(setting) ?? null);
    return new Set(values).size > 1 ? [{ setting, values }] : [];
  });
}

/** Lists are one setting each: an entrypoint is read as a whole. */
function settingsOf(value: unknown, path: string): [string, string][] {
  if (value === null || value === undefined) return [];
  if (typeof value !== "object") return [[path, String(value)]];
  if (Array.isArray(value))
    return [[path, value.every((one) => typeof one !== "object") ? value.join(" ") : JSON.stringify(value)]];
  return Object.entries(value).flatMap(([name, inner]) => settingsOf(inner, path === "" ? name : `${path}.${name}`));
}
