/** What a token may do, in words, and what a form asks for. Pure. */
import type { TokenRow } from "../types";

export const ROLES = ["viewer", "runner", "admin"] as const;
export type Role = (typeof ROLES)[number];
export type Grant = { readonly role: Role } | { readonly projects: Readonly<Record<string, Role>> };

/** "vision: runner, ctr: viewer", or the scopes of a token that is for all projects. */
export function powers(token: Pick<TokenRow, "scopes" | "projects">): string {
  if (token.projects === null) return token.scopes.length === 0 ? "join" : `${token.scopes.join(", ")} in all projects`;
  return Object.entries(token.projects)
    .sort(([a], [b]) => (a < b ? -1 : 1))
    .map(([project, role]) => `${project}: ${role}`)
    .join(", ");
}

/** A role in each of the projects that are named with commas, or in all if none is. */
export function grantOf(role: Role, projects: string): Grant {
  const names = projects.split(/[\s,]+/).filter((name) => name !== "");
  return names.length === 0 ? { role } : { projects: Object.fromEntries(names.map((name) => [name, role])) };
}
