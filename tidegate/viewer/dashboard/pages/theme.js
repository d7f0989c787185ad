// Light, dark, or as the system has it.
const THEMES = ["light dark", "light", "dark"];

function apply(theme) {
  document.documentElement.style.colorScheme = theme;
  document.getElementById("theme").textContent = { light: "Light", dark: "Dark" }[theme] ?? "Auto";
}

export function nextTheme() {
  const next = THEMES[(THEMES.indexOf(localStorage.getItem("theme") ?? THEMES[0]) + 1) % THEMES.length];
  localStorage.setItem("theme", next);
  apply(next);
}

document.getElementById("theme").addEventListener("click", nextTheme);
apply(localStorage.getItem("theme") ?? THEMES[0]);
